#!/usr/bin/env python3
"""Verifies and times the attention kernels beside PyTorch's own, in one run and on the same tensors.

    make libattention && python3 dev/bench_attention.py
    python3 dev/bench_attention.py --shape 16,12,1024,64,packed --dtype bf16 --kernels flash_simt,build/attention/mine.so

Ours are called through build/libattention.so (dev/torch_attention.py), PyTorch's through the operators behind
scaled_dot_product_attention: flash (FlashAttention 2), cudnn, efficient; on a CPU flash alone. Nothing of autograd is timed,
forward and backward are calls with all their inputs at hand. PyTorch's operators allocate their results from its caching
allocator, ours get theirs beforehand; the allocator costs the GPU nothing, and the CPU runs ahead of it.

Packed shapes hold Q, K and V in one (B, T, 3, NH, HS) tensor and O and dO as (B, T, NH, HS), as the trainer does; in the
others each is a contiguous (B, NH, T, HS). PyTorch reads the same views.

Every result is first compared with float64, computed here on the same device, per head and per stripe of rows, by the
bounds of tests/bounds.h; flash_tf32 with float64 of inputs rounded to TF32, by the bounds of that. A kernel of ours that is
wrong is not timed, and the exit status is 1; where an operator of PyTorch exceeds the bound, its line says so. "of bound" is
the largest error as a share of what is allowed.

Times are medians of CUDA events around one call on random data, the second-level cache flushed before each, kernels taking
turns. Operations as the papers count them: forward 4*B*NH*T*T*HS/2 for the causal half, backward 2.5 times that. "x flash"
is how many times faster a kernel is than flash: forward / backward / both.

The table goes to stdout, and to --out; a run of all shapes and kernels also to dev/results/<gpu>/attention_torch.csv.
Exit status: 0, 1 where a kernel of ours is wrong or failed or --out cannot be written, 2 for wrong arguments. Environment:
LIBATTENTION, as above.
"""
import argparse
import collections
import csv
import math
import os
import re
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import bench  # noqa: E402

MISSING = None
try:
    import torch
    import torch_attention
except ImportError as fault:  # need_torch() says so, behind --help and wrong arguments
    MISSING = fault


class Fault(Exception):
    """What is wrong with the arguments or the machine, in one sentence."""


Shape = collections.namedtuple("Shape", "B NH T HS packed dtype")

# GPT-2's with packed QKV, then the papers', then fp32.
GPU_SHAPES = [Shape(64, 12, 1024, 64, True, "bf16"), Shape(16, 12, 1024, 64, True, "bf16"),
              Shape(16, 32, 1024, 64, False, "bf16"), Shape(8, 32, 2048, 64, False, "bf16"),
              Shape(4, 32, 4096, 64, False, "bf16"), Shape(2, 32, 8192, 64, False, "bf16"),
              Shape(1, 32, 16384, 64, False, "bf16"), Shape(16, 16, 1024, 128, False, "bf16"),
              Shape(8, 16, 2048, 128, False, "bf16"), Shape(4, 16, 4096, 128, False, "bf16"),
              Shape(2, 16, 8192, 128, False, "bf16"), Shape(1, 16, 16384, 128, False, "bf16"),
              Shape(16, 12, 1024, 64, False, "fp32"), Shape(4, 16, 4096, 64, False, "fp32")]
CPU_SHAPES = [Shape(4, 12, 64, 64, True, "fp32"), Shape(8, 6, 256, 64, True, "fp32")]

# PyTorch's operators by what they are called here; the gradient's has "_backward" at its end.
PEERS = {"cuda": {"flash": "_scaled_dot_product_flash_attention", "cudnn": "_scaled_dot_product_cudnn_attention",
                  "efficient": "_scaled_dot_product_efficient_attention"},
         "cpu": {"flash": "_scaled_dot_product_flash_attention_for_cpu"}}
WAYS = ("forward", "backward", "both")
SECONDS = 1.5  # what a kernel may take for all its runs on a shape; at least LEAST_RUNS of them are made
LEAST_RUNS = 3
FLUSH_BYTES = {"cuda": 256 << 20, "cpu": 96 << 20}
SPIN_CYCLES = 2_000_000  # about a millisecond, in which the CPU queues what is timed
TRUTH_MATRICES = 14  # T x T matrices of float64 that solve() holds at most


# --- the truth and the judgement (tests/attention_truth.h, tests/bounds.h) ----------------------------------------------

QUANTITIES = ("O", "LSE", "dQ", "dK", "dV")
PRECISIONS = ("fp32", "bf16", "tf32")  # a shape's dtype, or of fp32 the one that flash_tf32 is judged by
Bounds = collections.namedtuple("Bounds", "stripe factor roundoff table")


def read_bounds(path=os.path.join(bench.ROOT, "tests", "bounds.h")):
    """The bounds that the tests hold kernels to: roundoff[precision]; table[precision][quantity]: terms, squares, logits."""
    with open(path) as file:
        text = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)
    stripe, factor = re.search(r"#define STRIPE (\d+)", text), re.search(r"#define FACTOR ([\d.]+)", text)
    units = re.findall(r"0x1p-\d+", text)
    found = [tuple(map(float, bound)) for bound in re.findall(r"\{([\d.]+), ([\d.]+), ([\d.]+)\}", text)]
    count, width = len(PRECISIONS), len(QUANTITIES)
    if not stripe or not factor or len(units) != count or len(found) != count * width:
        raise Fault(f"{path}: {len(units)} unit roundoffs and {len(found)} bounds, expected STRIPE, FACTOR, {count} and "
                    f"{count * width}")
    return Bounds(int(stripe.group(1)), float(factor.group(1)), dict(zip(PRECISIONS, map(float.fromhex, units))),
                  {precision: dict(zip(QUANTITIES, found[k * width:])) for k, precision in enumerate(PRECISIONS)})


def round_tf32(x):
    """fp32 rounded to TF32, to nearest, ties away from zero."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1fff).view(torch.float32)


ROUNDED = {"fp32": lambda x: x, "bf16": lambda x: x.bfloat16().float(), "tf32": round_tf32}  # as factors of products


def future_of(Q):
    """(T, T), true where the column is later than the row."""
    return torch.ones(Q.shape[1], Q.shape[1], dtype=torch.bool, device=Q.device).triu(1)


def largest(x):
    """(h, T, 1): largest element of each row, by size."""
    return x.abs().amax(2, keepdim=True)


def solve(Q, K, V, dO, scale, rounds_results=True):
    """The truth from (h, T, HS) tensors in float64, with the measures of tests/bounds.h.

    Returns four dictionaries by quantity: the truth (h, T, HS), LSE (h, T, 1); by how many u the roundings of the plain
    computation move a row at worst, the sum of the squares of the single ones (of LSE 0), and what errors of the logits do
    to it, each (h, T, 1). Not `rounds_results`: O and the gradients are not rounded as factors are.
    """
    future, size = future_of(Q), abs(scale)
    s_abs = (Q.abs() @ K.abs().mT).mul_(size).masked_fill_(future, 0).amax(2, keepdim=True)  # (h, T, 1)
    P = (Q @ K.mT).mul_(scale).masked_fill_(future, -math.inf)                               # (h, T, T), as all below
    LSE = P.logsumexp(2, keepdim=True)
    P.sub_(LSE).exp_()
    dP, dP_abs = dO @ V.mT, dO.abs() @ V.abs().mT
    D_abs = (P * dP_abs).sum(2, keepdim=True)
    O, each = P @ V, P * dP
    D, rest = each.sum(2, keepdim=True), (dO * O).abs_().mul_(rounds_results)
    D_terms = each.abs_().sum(2, keepdim=True).add_(rest.sum(2, keepdim=True))
    D_squares = each.square_().sum(2, keepdim=True).add_(rest.square_().sum(2, keepdim=True))
    del each
    P_error = (1 - P).mul_(s_abs).add_(LSE.abs()).mul_(P)
    dS_error = dP.abs().add_(D.abs()).mul_(P_error).add_(dP_abs.add_(D_abs).mul_(P)).mul_(size)
    del dP_abs
    dS = dP.sub_(D).mul_(P).mul_(scale)
    truth = {"O": O, "LSE": LSE, "dQ": dS @ K, "dK": dS.mT @ Q, "dV": P.mT @ dO}
    q, k, v, do = map(largest, (Q, K, V, dO))
    logits = {"O": P_error @ v, "LSE": s_abs, "dQ": dS_error @ k, "dK": dS_error.mT @ q, "dV": P_error.mT @ do}
    del P_error, dS_error
    reach = (P @ k).mul_(size)  # what an error of D does to a row of dQ
    dS.abs_()
    terms = {"O": P @ v, "LSE": 1 + LSE.abs(), "dQ": (dS @ k).mul_(2).add_(reach * D_terms),
             "dK": (dS.mT @ q).mul_(2).add_(P.mT @ (q * D_terms) * size), "dV": P.mT @ do}
    P.square_(), dS.square_()
    squares = {"O": P @ v.square(), "LSE": torch.zeros_like(LSE),
               "dQ": (dS @ k.square()).mul_(2).add_(reach.square() * D_squares),
               "dK": (dS.mT @ q.square()).mul_(2).add_(P.mT @ (q.square() * D_squares) * size ** 2),
               "dV": P.mT @ do.square()}
    return truth, terms, squares, logits


def solve_plainly(Q, K, V, dO, scale, precision):
    """The plain computation of tests/bounds.h, from (h, T, HS) in fp32: P and dS rounded, and but for tf32 the results too,
    D from the rounded O."""
    rounded = ROUNDED[precision]
    stored = rounded if precision != "tf32" else ROUNDED["fp32"]
    P = (Q @ K.mT).mul_(scale).masked_fill_(future_of(Q), -math.inf)
    LSE = P.logsumexp(2, keepdim=True)
    P = rounded(P.softmax(2))
    O = stored(P @ V)
    D = (dO * O).sum(2, keepdim=True)
    dS = rounded((dO @ V.mT).sub_(D).mul_(P).mul_(scale))
    return {"O": O, "LSE": LSE, "dQ": stored(dS @ K), "dK": stored(dS.mT @ Q), "dV": stored(P.mT @ dO)}


def by_stripe(rows, stripe):
    """(h, stripes) largest of (h, T, n), of `stripe` rows together; NaN where one is."""
    rows = rows.amax(2)
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % stripe)).unflatten(1, (-1, stripe)).amax(2)


class Truth:
    """What attention of these tensors should give, and how far off each stripe may be."""

    def __init__(self, tensors, bounds, memory, precision):
        """tensors: of make_tensors(). memory: bytes that may be used for the T x T matrices of some heads at a time."""
        Q, K, V, dO = (x.flatten(0, 1) for x in (tensors.Q, tensors.K, tensors.V, tensors.dO))  # (B*NH, T, HS)
        heads, T = Q.shape[:2]
        self.stripe, parts = bounds.stripe, {quantity: [] for quantity in QUANTITIES}
        step = max(1, int(memory // (8 * T * T * TRUTH_MATRICES)))
        for first in range(0, heads, step):
            some = [ROUNDED[precision](x[first:first + step].float()) for x in (Q, K, V, dO)]
            plain = solve_plainly(*some, tensors.scale, precision)
            truth, *measures = solve(*(x.double() for x in some), tensors.scale, precision != "tf32")
            for quantity in QUANTITIES:
                unit = bounds.roundoff["fp32" if quantity == "LSE" else precision]
                of_terms, of_squares, of_logits = bounds.table[precision][quantity]
                off = by_stripe((plain[quantity] - truth[quantity]).abs(), bounds.stripe)
                terms, squares, logits = (by_stripe(measure[quantity], bounds.stripe) for measure in measures)
                size = by_stripe(truth[quantity].abs(), bounds.stripe) * (precision != "tf32")  # what the result rounds
                if of_squares > 0:
                    floor = (of_terms * (terms + size)).minimum(of_squares * (squares + size ** 2).sqrt())
                    allowed = (bounds.factor * off).maximum(unit * floor)
                else:
                    allowed = bounds.factor * off + unit * of_terms * terms
                allowed = allowed + of_logits * bounds.roundoff["fp32"] * logits
                parts[quantity].append((truth[quantity], allowed))
        self.value = {quantity: torch.cat([part[0] for part in found]) for quantity, found in parts.items()}
        self.allowed = {quantity: torch.cat([part[1] for part in found]) for quantity, found in parts.items()}

    def judge(self, results):
        """results: quantity to (B, NH, T, HS), LSE (B, NH, T). Returns the largest error as a share of what is allowed, NaN
        where there is one, and a sentence about the first stripe that exceeds it, "" where none does."""
        worst, sentence = 0.0, ""
        for quantity, found in results.items():
            right, allowed = self.value[quantity], self.allowed[quantity]
            error = by_stripe((found.reshape(right.shape).double() - right).abs(), self.stripe)
            share = error / allowed
            most = share.max().item()
            worst = worst if most <= worst or math.isnan(worst) else most
            if most <= 1 or sentence:
                continue
            head, stripe = (share <= 1).logical_not().nonzero()[0].tolist()
            last = min((stripe + 1) * self.stripe, right.shape[1]) - 1
            sentence = (f"{quantity} head {head} rows {stripe * self.stripe} to {last}: error {error[head, stripe]:.3g}, "
                        f"allowed {allowed[head, stripe]:.3g}")
        return worst, sentence


# --- tensors and what works on them -------------------------------------------------------------------------------------

Tensors = collections.namedtuple("Tensors", "shape scale Q K V dO")  # Q, K, V, dO: (B, NH, T, HS) views


def views(shape, fill):
    """Q, K, V and O or their gradients as (B, NH, T, HS) views; fill(i, size): part i of a tensor of that size."""
    B, NH, T, HS = shape[:4]
    if not shape.packed:
        return [fill(i, (B, NH, T, HS)) for i in range(4)]
    parts = [fill(i, (B, T, NH, HS)) for i in range(3)]
    packed = torch.stack(parts, 2)  # (B, T, 3, NH, HS)
    return [*packed.permute(2, 0, 3, 1, 4).unbind(0), fill(3, (B, T, NH, HS)).transpose(1, 2)]


def make_tensors(shape, device, seed=29):
    """Random inputs off zero mean: errors relative to sums that cancel say nothing."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[shape.dtype]
    generator = torch.Generator(device).manual_seed(seed)
    mean = (0.25, -0.125, 0.5, 0.375)

    def fill(i, size):
        return (torch.randn(size, generator=generator, device=device) + mean[i]).to(dtype)
    return Tensors(shape, shape.HS ** -0.5, *views(shape, fill))


def precision_of(kernel, shape):
    """What a kernel's results on a shape are judged by."""
    return "tf32" if kernel == "flash_tf32" and shape.dtype == "fp32" else shape.dtype


class Subject:
    """Something that is timed: forward() and backward() work on the same tensors, in this order at first."""

    def __init__(self, name):
        self.name, self.runs, self.error, self.note = name, 0, None, ""
        self.times = {way: [] for way in WAYS}

    def both(self):
        self.forward()
        self.backward()


class Ours(Subject):
    """A kernel of libattention.so or of a .so, called `label` in tables; ValueError where it refuses the tensors."""

    def __init__(self, name, tensors, label=""):
        super().__init__(label or os.path.basename(name))
        self.call = torch_attention._Call(tensors.Q, tensors.scale, name, tf32=precision_of(name, tensors.shape) == "tf32")
        kernel, shape, Q = self.call.kernel, self.call.shape, tensors.Q
        self.ways = kernel.forward, kernel.backward
        # NaN, so that what is read before it is written, or never written, shows.
        self.saved = self.call.buffer(kernel.saved_bytes(shape)).fill_(255)
        self.scratch = self.call.buffer(kernel.scratch_bytes(shape)).fill_(255)
        self.LSE = torch.full(Q.shape[:3], math.nan, dtype=torch.float32, device=Q.device)
        gradients = views(tensors.shape, lambda i, size: torch.full(size, math.nan, dtype=Q.dtype, device=Q.device))
        self.O, self.gradients = gradients.pop(), gradients
        view = torch_attention._view
        inputs = [view(x) for x in (tensors.Q, tensors.K, tensors.V)]
        saved, scratch = self.saved.data_ptr(), self.scratch.data_ptr()
        self.forward_arguments = [view(self.O), self.LSE.data_ptr(), saved, scratch, *inputs]
        self.backward_arguments = [*(view(x) for x in self.gradients), scratch, view(tensors.dO), *inputs, view(self.O),
                                   self.LSE.data_ptr(), saved]

    def forward(self):
        self.call.run(self.ways[0], *self.forward_arguments)

    def backward(self):
        self.call.run(self.ways[1], *self.backward_arguments)

    def results(self):
        return dict(zip(QUANTITIES, (self.O, self.LSE, *self.gradients)))


class Peer(Subject):
    """An operator of PyTorch and its gradient. Arguments are given by the names that the operators' schemas have, which
    differ between versions in their order. RuntimeError where PyTorch refuses or wants what is not known here."""

    def __init__(self, name, operator, tensors):
        super().__init__("PyTorch " + name)
        try:
            self.operators = [getattr(torch.ops.aten, operator + end).default for end in ("", "_backward")]
        except AttributeError:
            raise RuntimeError(f"PyTorch {torch.__version__} has no {operator}") from None
        self.values = {"query": tensors.Q, "key": tensors.K, "value": tensors.V, "attn_bias": None, "attn_mask": None,
                       "compute_log_sumexp": True, "dropout_p": 0.0, "is_causal": True, "return_debug_mask": False,
                       "scale": tensors.scale, "grad_out": tensors.dO, "grad_out_": tensors.dO,
                       "grad_input_mask": [True, True, True, False]}

    def apply(self, operator):
        schema, positional, named = operator._schema, [], {}
        for argument in schema.arguments:
            if argument.name not in self.values:
                raise RuntimeError(f"{schema.name} wants '{argument.name}', which is not known here")
            if argument.kwarg_only:
                named[argument.name] = self.values[argument.name]
            else:
                positional.append(self.values[argument.name])
        return operator(*positional, **named)

    def forward(self):
        found = self.apply(self.operators[0])
        names = [result.name for result in self.operators[0]._schema.returns]
        same = {"output": "out", "log_sumexp": "logsumexp", "rng_state": "philox_seed", "unused": "philox_offset"}
        self.values.update((same.get(name, name), value) for name, value in zip(names, found))

    def backward(self):
        self.gradients = self.apply(self.operators[1])

    def results(self):
        return dict(zip(("O", "dQ", "dK", "dV"), (self.values["out"], *self.gradients)))


# --- time ---------------------------------------------------------------------------------------------------------------

class Timer:
    """Seconds of one call with cold caches."""

    def __init__(self, device):
        self.flush = torch.zeros(FLUSH_BYTES[device], dtype=torch.uint8, device=device)
        self.on_gpu = device == "cuda"
        if self.on_gpu:
            self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds(self, run):
        self.flush.add_(1)
        if not self.on_gpu:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        torch.cuda._sleep(SPIN_CYCLES)
        self.start.record()
        run()
        self.end.record()
        self.end.synchronize()
        return 1e-3 * self.start.elapsed_time(self.end)


def time_subjects(subjects, timer, repeats):
    """Fills in their times, the subjects taking turns. A first run of each warms up and tells how many it can have."""
    for subject in subjects:
        once = sum(timer.seconds(getattr(subject, way)) for way in WAYS)
        subject.runs = min(repeats, max(LEAST_RUNS, int(SECONDS / once)))
    for turn in range(max((subject.runs for subject in subjects), default=0)):
        for subject in subjects:
            for way in WAYS if turn < subject.runs else ():
                subject.times[way].append(timer.seconds(getattr(subject, way)))


# --- a shape ------------------------------------------------------------------------------------------------------------

def describe(shape):
    return f"B{shape.B} NH{shape.NH} T{shape.T} HS{shape.HS} {shape.dtype}{' packed' if shape.packed else ''}"


def operations(shape, way):
    forward = 2.0 * shape.B * shape.NH * shape.T * shape.T * shape.HS
    return forward * {"forward": 1, "backward": 2.5, "both": 3.5}[way]


def first_line(error):
    return str(error).strip().split("\n")[0]


def open_subject(make, truth, strict):
    """Makes a subject, runs it once and judges it. Returns (it or None, what is to be said of it). With `strict` forward and
    backward must give the same bits again."""
    try:
        subject = make()
        subject.both()
        if strict:
            before = [x.clone() for x in subject.results().values()]
            subject.both()
            if not all(torch.equal(a, b) for a, b in zip(before, subject.results().values())):
                return subject, "gives other bits the second time"
    except torch.cuda.OutOfMemoryError:
        return None, "left out: not enough memory"
    except (ValueError, RuntimeError) as error:
        return None, f"{'refuses' if isinstance(error, ValueError) else 'fails'}: {first_line(error)}"
    if not truth:
        return subject, ""
    subject.error, sentence = truth.judge(subject.results())
    return subject, sentence


def bench_shape(shape, options, timer, bounds):
    """Verifies and times all kernels on a shape, prints its table. Returns (rows of the CSV, how many of ours are wrong)."""
    tensors = make_tensors(shape, options.device)
    on_gpu = options.device == "cuda"
    memory = min(32 << 30, torch.cuda.mem_get_info()[0] // 2) if on_gpu else 1 << 30
    wanted = {shape.dtype, *(precision_of(name, shape) for name in options.kernels)} if options.verify else ()
    truths = {precision: Truth(tensors, bounds, memory, precision) for precision in wanted}
    if on_gpu:
        torch.cuda.empty_cache()
    print(describe(shape), flush=True)
    subjects, faults = [], 0
    for name in options.kernels:
        truth = truths.get(precision_of(name, shape))
        subject, sentence = open_subject(lambda: Ours(name, tensors, options.labels[name]), truth, options.deterministic)
        faults += sentence.startswith("fails") or bool(subject and sentence)
        if sentence:
            print(f"  {name}: {'WRONG, not timed: ' if subject else ''}{sentence}")
        else:
            subjects.append(subject)
    for name, operator in PEERS[options.device].items():
        subject, sentence = open_subject(lambda: Peer(name, operator, tensors), truths.get(shape.dtype), False)
        if not subject:
            print(f"  PyTorch {name}: {sentence}")
            continue
        if subject.error is not None and math.isnan(subject.error):  # an operator that takes the type and cannot do it
            print(f"  PyTorch {name}: gives no numbers, not timed: {sentence}")
            continue
        subject.note = f"exceeds the bound: {sentence}" if sentence else ""
        subjects.append(subject)
    time_subjects(subjects, timer, options.repeats)
    rows = [make_row(shape, subject, subjects, options.device) for subject in subjects]
    print_rows(rows, options.device)
    return rows, faults


def unit_of(device):
    return ("tflops", 1e12) if device == "cuda" else ("gflops", 1e9)


def make_row(shape, subject, subjects, device):
    """A row of the CSV: times, rates, error, and how many times faster than each of PyTorch's."""
    unit, per = unit_of(device)
    medians = {way: statistics.median(subject.times[way]) for way in WAYS}
    row = {"kernel": subject.name, "B": shape.B, "NH": shape.NH, "T": shape.T, "HS": shape.HS, "dtype": shape.dtype,
           "layout": "packed" if shape.packed else "heads"}
    for way in WAYS:
        row[f"{way}_ms"] = f"{1e3 * medians[way]:.6g}"
        row[f"{way}_{unit}"] = f"{operations(shape, way) / medians[way] / per:.4g}"
    row["of_bound"] = "" if subject.error is None else f"{subject.error:.3g}"
    peers = {other.name.split()[1]: other for other in subjects if isinstance(other, Peer)}
    for name in PEERS[device]:
        for way in WAYS:
            times = peers[name].times[way] if name in peers else None
            row[f"{way}_x_{name}"] = f"{statistics.median(times) / medians[way]:.3f}" if times else ""
    return {**row, "runs": subject.runs, "note": subject.note}


def columns_of(device):
    unit = unit_of(device)[0]
    return ["kernel", "B", "NH", "T", "HS", "dtype", "layout", *(f"{way}_ms" for way in WAYS),
            *(f"{way}_{unit}" for way in WAYS), "of_bound",
            *(f"{way}_x_{name}" for name in PEERS[device] for way in WAYS), "runs", "note"]


def print_rows(rows, device):
    unit = unit_of(device)[0]
    peers = list(PEERS[device])
    width = max([18, *(len(row["kernel"]) + 1 for row in rows)])
    print(f"  {'kernel':<{width}}" + "".join(f"{way + ' ms':>12}{unit:>8}" for way in WAYS) +
          f"{'of bound':>10}{'runs':>5}" + "".join(f"{'x ' + name:>17}" for name in peers))
    for row in rows:
        found = ([row[f"{way}_x_{name}"] for way in WAYS] for name in peers)
        ratios = ("/".join(f"{float(ratio):.2f}" for ratio in three if ratio) for three in found)
        print(f"  {row['kernel']:<{width}}" + "".join(f"{row[f'{way}_ms']:>12}{row[f'{way}_{unit}']:>8}" for way in WAYS) +
              f"{row['of_bound']:>10}{row['runs']:>5}" + "".join(f"{ratio:>17}" for ratio in ratios) +
              (f"  {row['note']}" if row["note"] else ""), flush=True)


def write_csv(path, head, columns, rows):
    """The CSV of a bench, `head` its first line."""
    try:
        with open(path, "w", newline="") as file:
            file.write(head)
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise Fault(f"{path}: cannot be written: {error.strerror}") from None
    print(f"wrote {path}")


# --- options ------------------------------------------------------------------------------------------------------------

def parse_shape(text):
    match = re.fullmatch(r"([1-9]\d*),([1-9]\d*),([1-9]\d*),([1-9]\d*)(,packed)?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"got '{text}', expected B,NH,T,HS or B,NH,T,HS,packed")
    return Shape(*map(int, match.groups()[:4]), bool(match.group(5)), "")


def parse_count(text):
    if not re.fullmatch(r"[1-9]\d{0,3}", text):
        raise argparse.ArgumentTypeError(f"got '{text}', expected a number from 1 to 9999")
    return int(text)


def label_kernels(names, known):
    """What kernels are called in tables: their names, of files the file's, or its path where that is not enough."""
    places = {}
    for name in names:
        place = name if name in known else os.path.realpath(name)
        if place in places:
            also = f", also as '{places[place]}'" if places[place] != name else ""
            raise Fault(f"--kernels: '{name}' is given twice{also}")
        places[place] = name
    short = [os.path.basename(name) for name in names]
    return {name: name if short.count(base) > 1 else base for name, base in zip(names, short)}


def need_torch():
    """Ends the program where PyTorch is not installed."""
    if MISSING:
        sys.exit(f"dev/{os.path.basename(sys.argv[0])} needs PyTorch: {MISSING}")


def parse_options(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", dest="shapes", action="append", type=parse_shape, metavar="B,NH,T,HS[,packed]",
                        help="a shape to measure; may be repeated (default: those of the papers, of GPT-2, of fp32)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="of --shape (default bf16, on a CPU fp32); without "
                        "--shape: only the shapes of this type")
    parser.add_argument("--kernels", metavar="NAME,...", help="names of the table or paths of .so files (default: all)")
    parser.add_argument("--repeats", type=parse_count, default=15, metavar="N", help="runs behind a median (default 15; "
                        f"fewer where a kernel would take more than {SECONDS} s)")
    parser.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True, help="compare with float64 first")
    parser.add_argument("--deterministic", action="store_true", help="ours and PyTorch's deterministic ways")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where PyTorch sees a GPU")
    parser.add_argument("--out", metavar="CSV", help="default: dev/results/<gpu>/attention_torch.csv, of a selection none")
    options = parser.parse_args(arguments)
    need_torch()
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise Fault(f"--device cuda: PyTorch {torch.__version__} sees no GPU here")
    whole = options.device == "cuda" and options.verify and not (options.shapes or options.dtype or options.kernels or
                                                                 options.deterministic)
    if options.shapes:
        dtype = options.dtype or ("bf16" if options.device == "cuda" else "fp32")
        options.shapes = [shape._replace(dtype=dtype) for shape in options.shapes]
    else:
        options.shapes = [shape for shape in (GPU_SHAPES if options.device == "cuda" else CPU_SHAPES)
                          if options.dtype in (None, shape.dtype)]
        if not options.shapes:
            raise Fault(f"--dtype {options.dtype}: nothing to measure on a CPU, whose shapes are fp32 where none is given; "
                        "name some with --shape")
    known = torch_attention.kernels(options.device)
    options.kernels = options.kernels.split(",") if options.kernels else known
    for name in options.kernels:
        if name not in known and not os.path.exists(name):
            raise Fault(f"--kernels: '{name}' is no file and not one of {', '.join(known)}")
    options.labels = label_kernels(options.kernels, known)
    if whole and not options.out:
        options.out = bench.results_path(bench.machine_name(options.device), "attention_torch.csv")
    return options


def main(arguments):
    try:
        options = parse_options(arguments)
        bounds = read_bounds()
    except (Fault, ImportError) as fault:
        print(f"bench_attention.py: {fault}", file=sys.stderr)
        return 2
    # fp32 means fp32; and deterministic mode must not fill the results of PyTorch's operators, which would be timed.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else its products are refused in deterministic mode
    torch.use_deterministic_algorithms(options.deterministic)
    if hasattr(torch.utils, "deterministic"):
        torch.utils.deterministic.fill_uninitialized_memory = False
    words = f"{bench.machine_words(options.device)}, PyTorch {torch.__version__.split('+')[0]}"
    print(f"{words}{', deterministic' if options.deterministic else ''}")
    timer, rows, faults = Timer(options.device), [], 0
    try:
        with torch.no_grad():
            for shape in options.shapes:
                found, wrong = bench_shape(shape, options, timer, bounds)
                rows, faults = rows + found, faults + wrong
    except RuntimeError as fault:  # after a fault of the GPU nothing more can be had from it
        print(f"bench_attention.py: {first_line(fault)}", file=sys.stderr)
        return 1
    if options.out:
        head = bench.header(words, "attention beside PyTorch's: medians, x_NAME: times faster than that one" +
                            (", deterministic" if options.deterministic else ""))
        try:
            write_csv(options.out, head, columns_of(options.device), rows)
        except Fault as fault:
            print(f"bench_attention.py: {fault}", file=sys.stderr)
            return 1
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
