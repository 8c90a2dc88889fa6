#!/usr/bin/env python3
"""The benches, as far as they run without a GPU. bench_attention: a selection leaves the tracked results alone.
bench_attention.py: its float64 truth and its judgement, planted faults included. bench.py: tables, and a GPU's trainer
played by the CPU's. profile_step.py: made-up output of ncu. gpu_test.sh: made-up answers of compute-sanitizer.

The parts with PyTorch are skipped without; where the running Python has none and /usr/bin/python3 does, that one goes on.
"""
import contextlib
import csv
import importlib.util
import io
import json
import math
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:0] = [HERE, os.path.join(ROOT, "dev")]
OTHER = "/usr/bin/python3"
if not importlib.util.find_spec("torch") and os.path.exists(OTHER) and \
        os.path.realpath(OTHER) != os.path.realpath(sys.executable) and \
        subprocess.run([OTHER, "-c", "import torch"], stderr=subprocess.DEVNULL).returncode == 0:
    os.execv(OTHER, [OTHER, __file__])
BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build"))
os.environ.setdefault("LIBATTENTION", os.path.join(BUILD, "libattention.so"))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from check import check, end, skip, test  # noqa: E402
from trainer_runs import TRAIN, build_kernel  # noqa: E402
import bench  # noqa: E402
import profile_step  # noqa: E402

if importlib.util.find_spec("torch"):
    import torch
    import bench_attention
else:
    torch = None

PROGRAM = os.path.join(BUILD, "dev", "bench_attention")
FOLDER = tempfile.TemporaryDirectory()
MACHINE = "NVIDIA H200, driver 580.1, CUDA"


def path(*names):
    return os.path.join(FOLDER.name, *names)


def write_script(name, text):
    """An executable file in the folder of made-up programs."""
    os.makedirs(path("bin"), exist_ok=True)
    with open(path("bin", name), "w") as file:
        file.write(text)
    os.chmod(path("bin", name), stat.S_IRWXU)


def call(function, *arguments):
    """(what a main() returned or exited with, its output and errors), in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            status = function(*arguments)
        except SystemExit as leaving:
            status = leaving.code
    return status, out.getvalue()


# --- build/dev/bench_attention ------------------------------------------------------------------------------------------

def run(*options):
    """Exit status, output and errors of bench_attention, in a folder of its own, as quick as it goes."""
    done = subprocess.run([PROGRAM, "--device", "cpu", "--shape", "1,1,16,16", "--repeats", "1", *options], cwd=path("cwd"),
                          capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def files():
    return sorted(name for _, _, names in os.walk(path("cwd")) for name in names)


def test_program():
    os.makedirs(path("cwd", "dev", "results"))
    with test("bench_attention: several kernels by name, and no CSV of a selection but with --out"):
        if not os.path.exists(PROGRAM):
            skip(f"{PROGRAM} is not built: make kernels")
        status, output, errors = run("--kernel", "tiled", "--kernel", "reference")
        check(status == 0 and "  tiled " in output and "  reference " in output, status, output, errors)
        check(not files(), "wrote", files())
        status, output, errors = run("--kernel", "tiled", "--out", "mine.csv")
        check(status == 0 and files() == ["mine.csv"] and "reference" not in output, status, output, errors, files())
        status, _, errors = run("--kernel", "tiled", "--kernel", "nowhere")
        check(status == 2 and "nowhere" in errors and errors.count("\n") == 1, status, errors)


    with test("bench_attention: a shape of more than can be counted is refused"):
        for shape in ("9223372036854775807,1,1,8", "999999999,9999999,99999999,8", "1,1,2000000000,1"):
            status, output, errors = run("--shape", shape, "--kernel", "tiled")
            check(status == 2 and shape in errors and "2^40" in errors and errors.count("\n") == 1, status, output, errors)
    with test("bench_attention: where no kernel takes a shape that is one sentence with the first reason, and no table"):
        kept = path("cwd", "kept.csv")
        with open(kept, "w") as file:
            file.write("kept\n")
        start = "no kernel here takes B 1, NH 1, T 16, HS 16, bf16"
        for more, words in (([], ": tiled computes in fp32 only"), (["--kernel", "reference"], ": reference computes in "),
                            (["--shape", "1,2,33,8"], ", or another of the shapes: tiled computes in fp32 only")):
            status, output, errors = run("--dtype", "bf16", "--out", "kept.csv", *more)
            check(status == 2 and not output and errors.startswith(start + words) and errors.count("\n") == 1, status, output,
                  errors)
        with open(kept) as file:
            check(file.read() == "kept\n", "a CSV was written")
        os.remove(kept)
    with test("bench_attention: a kernel that crashes is named, and where one may be that is not seen"):
        crash = path("crash.so")
        if not build_kernel(crash, 'kernel.backward = backward; crash_in_backward = 0; kernel.name = "crasher";'):
            skip("no C compiler that builds a shared object (set CC)")
        status, _, errors = run(crash)
        check(status < 0 and "crashed in attention kernel crasher, backward: SIG" in errors and errors.count("\n") == 1, status, errors)
        status, _, errors = run("--kernel", "naive", crash)
        check(status == 2 and "give its file too" in errors and errors.count("\n") == 1, status, errors)
    with test("bench_attention: kernels of the same name are told apart by their files; the same file twice is refused"):
        kernel = os.path.join(BUILD, "attention", "naive.so")
        if not os.path.exists(kernel) or not os.path.exists(PROGRAM):
            skip(f"{kernel} is not built: make kernels")
        copies = [path(name) for name in ("one.so", "another, one.so")]
        for copy in copies:
            shutil.copy(kernel, copy)
        status, output, errors = run("--kernel", "tiled", "--kernel", "naive", "--out", "mine.csv", *copies)
        rows = bench.read_rows(path("cwd", "mine.csv"))
        wanted = ["tiled", *(f"naive ({copy})" for copy in copies)]
        check(status == 0 and [row["kernel"] for row in rows] == wanted and all(row["forward_ms"] for row in rows), rows,
              errors)
        lines = output.splitlines()[2:]
        check(all(line.startswith(f"  {label} ") for line, label in zip(lines[1:], wanted)), output)
        check(len({len(line) for line in lines}) == 1, "the columns are not below each other:", output)
        status, output, errors = run("--kernel", "naive", kernel)
        check(status == 0 and "  naive  " in output, status, output, errors)
        status, output, errors = run(copies[0], os.path.join(path(), ".", "one.so"))
        check(status == 2 and "given twice" in errors and errors.count("\n") == 1, status, errors)


# --- dev/bench_attention.py ---------------------------------------------------------------------------------------------

def random_heads(h, T, HS, seed=0):
    """Q, K, V, dO: (h, T, HS) in float64."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(h, T, HS, generator=generator, dtype=torch.float64) + 0.25 for _ in range(4)]


def test_truth():
    with test("bench_attention.py: the truth is PyTorch's autograd in float64"):
        Q, K, V, dO = random_heads(3, 21, 8)
        truth, *_ = bench_attention.solve(Q, K, V, dO, 0.3)
        for x in (Q, K, V):
            x.requires_grad_()
        S = (0.3 * Q @ K.mT).masked_fill(torch.ones(21, 21, dtype=torch.bool).triu(1), -math.inf)
        (S.softmax(2) @ V).backward(dO)
        for name, right in (("O", S.softmax(2) @ V), ("LSE", S.logsumexp(2, keepdim=True)), ("dQ", Q.grad), ("dK", K.grad),
                            ("dV", V.grad)):
            error = (truth[name] - right).abs().max().item()
            check(error < 1e-12, f"{name} is off by {error}")
    with test("bench_attention.py: the measures beside the truth, element by element"):
        Q, K, V, dO = (x[0] for x in random_heads(1, 4, 3, 1))
        _, terms, squares, logits = bench_attention.solve(Q[None], K[None], V[None], dO[None], -0.5)
        right = measure_slowly(Q.tolist(), K.tolist(), V.tolist(), dO.tolist(), -0.5)
        for kind, found in (("terms", terms), ("squares", squares), ("logits", logits)):
            for name in bench_attention.QUANTITIES:
                for t in range(4):
                    got, wanted = found[name][0, t, 0].item(), right[kind][name][t]
                    check(abs(got - wanted) < 1e-12 * (1 + wanted), f"{kind} of {name} in row {t}: {got}, not {wanted}")


def measure_slowly(Q, K, V, dO, scale, rounds_results=True):
    """terms, squares and logits of one head, as tests/attention_truth.h sums them up, row by row."""
    T, dot = len(Q), lambda x, y: sum(a * b for a, b in zip(x, y))
    size, dot_abs, most = abs(scale), lambda x, y: sum(abs(a * b) for a, b in zip(x, y)), lambda x: max(map(abs, x))
    terms, squares, logits = ({name: [0.0] * T for name in bench_attention.QUANTITIES} for _ in range(3))

    def add(name, t, x):
        terms[name][t] += abs(x)
        squares[name][t] += x * x
    for i in range(T):
        S = [scale * dot(Q[i], K[j]) for j in range(i + 1)]
        s_abs = max(size * dot_abs(Q[i], K[j]) for j in range(i + 1))
        lse = math.log(sum(map(math.exp, S)))
        P = [math.exp(s - lse) for s in S]
        dP, dP_abs = [dot(dO[i], V[j]) for j in range(i + 1)], [dot_abs(dO[i], V[j]) for j in range(i + 1)]
        D, D_abs = dot(P, dP), dot(P, dP_abs)
        O = [dot(P, [V[j][d] for j in range(i + 1)]) for d in range(len(V[0]))]
        of_D = [P[j] * dP[j] for j in range(i + 1)] + [dO[i][d] * O[d] for d in range(len(O)) if rounds_results]
        terms["LSE"][i], logits["LSE"][i] = 1 + abs(lse), s_abs
        for j in range(i + 1):
            p_error, ds = P[j] * ((1 - P[j]) * s_abs + abs(lse)), size * P[j] * (dP[j] - D)
            ds_error = size * (p_error * (abs(dP[j]) + abs(D)) + P[j] * (dP_abs[j] + D_abs))
            for name, t, x in (("O", i, P[j] * most(V[j])), ("dV", j, P[j] * most(dO[i])),
                               *2 * (("dQ", i, ds * most(K[j])), ("dK", j, ds * most(Q[i])))):
                add(name, t, x)
            for x in of_D:
                add("dK", j, size * P[j] * most(Q[i]) * x)
            for name, t, x in (("O", i, p_error * most(V[j])), ("dQ", i, ds_error * most(K[j])),
                               ("dK", j, ds_error * most(Q[i])), ("dV", j, p_error * most(dO[i]))):
                logits[name][t] += x
        for x in of_D:
            add("dQ", i, size * sum(P[j] * most(K[j]) for j in range(i + 1)) * x)
    return {"terms": terms, "squares": squares, "logits": logits}


def open_truth(precision="fp32", memory=1 << 30):
    """(tensors, their truth, a right result) of a shape whose last stripe is short."""
    shape = bench_attention.Shape(2, 2, 41, 8, True, "fp32" if precision == "tf32" else precision)
    tensors = bench_attention.make_tensors(shape, "cpu")
    truth = bench_attention.Truth(tensors, bench_attention.read_bounds(), memory, precision)
    rounded = [bench_attention.ROUNDED[precision](x.flatten(0, 1).float()) for x in tensors[2:]]
    plain = bench_attention.solve_plainly(*rounded, tensors.scale, precision)
    return tensors, truth, {name: x.reshape(2, 2, 41, *(() if name == "LSE" else (8,))) for name, x in plain.items()}


def allow_slowly(precision, name, off, size, terms, squares, logits):
    """What tests/bounds.h allows from the largest of each in a stripe."""
    if precision == "fp32" or name == "LSE":
        return 2 * off + 2 ** -24 * (2 if name in ("dQ", "dK") else 4) * terms + 2 * 2 ** -24 * logits
    if precision == "tf32":
        return max(2 * off, 2 ** -11 * min(terms, 2 * math.sqrt(squares))) + 2 * 2 ** -24 * logits
    return max(2 * off, 2 ** -8 * min(terms + size, 2 * math.sqrt(squares + size ** 2))) + 2 ** -24 * logits


def test_judgement():
    for precision in bench_attention.PRECISIONS:
        with test(f"bench_attention.py: what is allowed in {precision}, stripe by stripe"):
            tensors, truth, results = open_truth(precision)
            head = (bench_attention.ROUNDED[precision](x[1, 0].float()).double().tolist() for x in tensors[2:])
            measures = measure_slowly(*head, tensors.scale, precision != "tf32").values()
            for name in bench_attention.QUANTITIES:
                for stripe in range(3):
                    rows = slice(16 * stripe, 16 * stripe + 16)
                    right = truth.value[name][2, rows]
                    off = (results[name][1, 0, rows].reshape(right.shape) - right).abs().max().item()
                    size = right.abs().max().item()
                    wanted = allow_slowly(precision, name, off, size, *(max(measure[name][rows]) for measure in measures))
                    got = truth.allowed[name][2, stripe].item()
                    check(abs(got - wanted) < 1e-9 * wanted, f"{name} stripe {stripe}: {got}, not {wanted}")
        with test(f"bench_attention.py: the plain computation passes in {precision}, within half of what is allowed"):
            _, truth, results = open_truth(precision)
            worst, sentence = truth.judge(results)
            check(not sentence and 0 < worst <= 0.5, worst, sentence)
        with test(f"bench_attention.py: planted faults do not pass in {precision}"):
            faults = {  # name: quantity, head, row; what becomes of the row
                "the last row stale": ("O", 3, 40, lambda x: x * 0),
                "a row of another head": ("dV", 2, 17, lambda x: x.flip(0)),
                "the mask off by one": ("LSE", 0, 0, lambda x: x + math.log(2)),
                "a factor forgotten": ("dK", 1, 33, lambda x: x * 8 ** 0.5),
                "not a number": ("dQ", 1, 5, lambda x: x * math.nan)}
            for fault, (quantity, head, row, spoil) in faults.items():
                spoilt = {name: x.clone() for name, x in results.items()}
                heads = spoilt[quantity].flatten(0, 1)
                heads[head, row] = spoil(heads[head, row])
                spoilt[quantity] = heads.reshape(spoilt[quantity].shape)
                worst, sentence = truth.judge(spoilt)
                place = f"{quantity} head {head} rows {row // 16 * 16} to {min(row // 16 * 16 + 15, 40)}"
                check(not worst <= 1 and sentence.startswith(place), f"{fault}: {worst}, '{sentence}', expected {place}")
    with test("bench_attention.py: heads a few at a time give the same truth"):
        (_, some, _), (_, all_of_them, _) = open_truth(memory=1), open_truth()
        for name in bench_attention.QUANTITIES:
            same = torch.allclose(some.value[name], all_of_them.value[name], rtol=1e-12, atol=1e-13)
            check(same and torch.allclose(some.allowed[name], all_of_them.allowed[name], rtol=0.5), name)
    with test("bench_attention.py: flash_tf32 alone is judged by TF32's bound, of inputs rounded as round_tf32 does"):
        shape, x = bench_attention.Shape(1, 1, 1, 8, True, "fp32"), 1 + 2 ** -10
        for kernel, wanted in (("flash_tf32", "tf32"), ("flash_tf32x3", "fp32")):
            check(bench_attention.precision_of(kernel, shape) == wanted, kernel)
        found = bench_attention.round_tf32(torch.tensor([x, -1 - 2 ** -11, 1 + 2 ** -11 - 2 ** -23, -0.0])).tolist()
        check(found == [x, -x, 1, 0], found)
    with test("bench_attention.py: the bounds are those of tests/bounds.h, or it says what is missing there"):
        bounds = bench_attention.read_bounds()
        units = {"fp32": 2 ** -24, "bf16": 2 ** -8, "tf32": 2 ** -11}
        check(bounds.stripe == 16 and bounds.factor == 2 and bounds.roundoff == units, bounds)
        with open(path("bounds.h"), "w") as file:
            file.write("#define STRIPE 16\n")
        try:
            bench_attention.read_bounds(path("bounds.h"))
            check(False, "a file without bounds was taken")
        except bench_attention.Fault as fault:
            check("0 bounds" in str(fault), fault)


BAD_TARGETS = [(path("no", "such.csv"), "No such file or directory"),
               *([("/dev/full", "No space left on device")] if os.path.exists("/dev/full") else [])]
SMALL = ("--device", "cpu", "--shape", "2,2,37,16,packed", "--shape", "1,3,20,8", "--repeats", "2")


def test_attention_runs():
    with test("bench_attention.py: kernels of the library, packed and not, into a table and a CSV"):
        if not os.path.exists(os.environ["LIBATTENTION"]):
            skip(f"no {os.environ['LIBATTENTION']}: make libattention")
        status, output = call(bench_attention.main, [*SMALL, "--out", path("attention.csv")])
        check(status == 0, status, output)
        rows = bench.read_rows(path("attention.csv"))
        found = {(row["kernel"], row["layout"]) for row in rows}
        check({("tiled", "packed"), ("tiled", "heads"), ("reference", "packed")} <= found, found)
        for row in rows:
            B, NH, T, HS = (int(row[size]) for size in ("B", "NH", "T", "HS"))
            rate = 4 * B * NH * T * T * HS / 2 / float(row["forward_ms"]) / 1e6
            check(abs(rate / float(row["forward_gflops"]) - 1) < 1e-2 and 0 < float(row["of_bound"]) <= 1, row)
    with test("bench_attention.py: a wrong kernel is not timed, and the exit status says so"):
        right = bench_attention.Ours.backward

        def wrong(self):
            right(self)
            if self.name == "tiled":
                self.gradients[2][0, 1, 18] += 1e-3
        bench_attention.Ours.backward = wrong
        try:
            status, output = call(bench_attention.main, [*SMALL, "--out", path("attention.csv")])
        finally:
            bench_attention.Ours.backward = right
        check(status == 1 and "tiled: WRONG, not timed: dV head 1 rows 16 to 31" in output, status, output)
        check("tiled" not in {row["kernel"] for row in bench.read_rows(path("attention.csv"))}, "it is in the CSV")
    with test("bench_attention.py: a kernel that refuses is named with its reason; wrong arguments are one sentence"):
        status, output = call(bench_attention.main, [*SMALL, "--dtype", "bf16"])
        check(status == 0 and re.search(r"tiled: refuses: .*fp32", output), status, output)
        for arguments, words in ((["--kernels", "nowhere"], "'nowhere'"), (["--shape", "1,2,3"], "B,NH,T,HS"),
                                 (["--repeats", "0"], "1 to 9999"), (["--device", "cuda"], "sees no GPU")):
            if arguments[0] == "--device" and torch.cuda.is_available():
                continue
            status, output = call(bench_attention.main, ["--device", "cpu", *arguments])
            check(status == 2 and words in output.splitlines()[-1], arguments, status, output)
    with test("bench_attention.py: a type that no default shape has is one sentence, not an empty table"):
        status, output = call(bench_attention.main, ["--device", "cpu", "--dtype", "bf16"])
        check(status == 2 and re.fullmatch(r"bench_attention.py: --dtype bf16: nothing to measure on a CPU, .*\n", output),
              status, output)
    with test("bench_attention.py: kernels of files of one name are told apart, one that is given twice is refused"):
        kernel = os.path.join(BUILD, "attention", "naive.so")
        if not os.path.exists(kernel):
            skip(f"{kernel} is not built: make kernels")
        os.makedirs(path("copies"))
        copies = [shutil.copy(kernel, path("copies", name)) for name in ("naive.so", "mine.so")]
        status, output = call(bench_attention.main, [*SMALL, "--kernels", ",".join(["tiled", kernel, *copies]), "--out",
                                                     path("attention.csv")])
        found = [row["kernel"] for row in bench.read_rows(path("attention.csv")) if "PyTorch" not in row["kernel"]]
        check(status == 0 and found == 2 * ["tiled", kernel, copies[0], "mine.so"], status, output, found)
        for twice in (["tiled", "tiled"], [kernel, os.path.join(BUILD, "attention", ".", "naive.so")]):
            status, output = call(bench_attention.main, [*SMALL, "--kernels", ",".join(twice)])
            check(status == 2 and "given twice" in output and output.count("\n") == 1, status, output)
    with test("bench_attention.py: a CSV that cannot be written is one sentence behind the table"):
        for out, words in BAD_TARGETS:
            status, output = call(bench_attention.main, [*SMALL, "--kernels", "tiled", "--no-verify", "--out", out])
            sentence = f"\nbench_attention.py: {out}: cannot be written: {words}\n"
            check(status == 1 and output.endswith(sentence), status, output)


def test_peers():
    with test("bench_attention.py: PyTorch's operators and their gradients get the arguments that they ask for"):
        if not hasattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward"):
            skip(f"PyTorch {torch.__version__} lacks them")
        shape = bench_attention.Shape(2, 3, 64, 64, False, "bf16")
        Q = torch.empty(2, 3, 64, 64, dtype=torch.bfloat16, device="meta")
        for name, operator in bench_attention.PEERS["cuda"].items():
            peer = bench_attention.Peer(name, operator, bench_attention.Tensors(shape, 0.125, Q, Q, Q, Q))
            peer.both()
            check({x: tuple(y.shape) for x, y in peer.results().items()} ==
                  dict.fromkeys(("O", "dQ", "dK", "dV"), (2, 3, 64, 64)), name, peer.results())


# --- dev/bench.py -------------------------------------------------------------------------------------------------------

def write_gpu():
    """A made-up nvidia-smi, and a trainer for a GPU that trains on the CPU, while the GPU's memory holds 512 MiB more."""
    write_script("nvidia-smi", f"""#!/bin/sh
case "$*" in
    *memory.used*) [ -e "{path('busy')}" ] && echo 1512 || echo 1000 ;;
    *) echo "NVIDIA H200, 580.1" ;;
esac
""")
    write_script("train_gpt", f"""#!{sys.executable}
import os, subprocess, sys, time
open({path('busy')!r}, "w").close()
time.sleep(0.4)
status = subprocess.call([{TRAIN!r}, *("cpu" if word == "cuda" else word for word in sys.argv[1:])])
os.remove({path('busy')!r})
sys.exit(status)
""")
    os.environ["PATH"] = path("bin") + os.pathsep + os.environ["PATH"]


def bench_tiny(*arguments):
    """bench.py on the made-up GPU with one tiny configuration, its results in the test's folder."""
    sizes = "--layers 1 --heads 2 --dim 16 --vocab 257 --seq 32 --batch 2"
    kept = (bench.GPU_CONFIGURATIONS, bench.GENERATE, bench.GENERATE_DTYPES, bench.TRAIN, bench.results_path, sys.argv)
    bench.GENERATE_DTYPES = {"cpu": ("fp32",), "cuda": ("fp32",)}
    bench.GENERATE = [("little", sizes, 20, 1, True), ("little, twice", sizes, 20, 2, False)]
    bench.GPU_CONFIGURATIONS = [("tiny", sizes, "fp32", True), ("other", sizes, "fp32", False)]
    bench.TRAIN, bench.results_path = path("bin", "train_gpt"), lambda machine, name: path(f"{machine}-{name}")
    sys.argv = ["bench.py", *arguments]
    try:
        return call(bench.main)
    finally:
        (bench.GPU_CONFIGURATIONS, bench.GENERATE, bench.GENERATE_DTYPES, bench.TRAIN, bench.results_path, sys.argv) = kept


def test_bench():
    with test("bench.py: --help is its docstring, an unknown option an error"):
        for option, status, words in (("--help", 0, "--readme"), ("--colour", 2, "--colour")):
            done = subprocess.run([sys.executable, bench.__file__, option], capture_output=True, text=True)
            check(done.returncode == status and words in done.stdout + done.stderr, option, done.returncode, done.stderr)
    with test("bench.py: rates of a CPU and of a GPU become a table"):
        row = {"kernel": "k", "B": "1", "NH": "2", "T": "3", "HS": "4", "dtype": "fp32"}
        for machine, unit, label in (("cpu-x", "gflops", "GFLOP/s"), ("nvidia-x", "tflops", "TFLOP/s")):
            lines = bench.attention_table(machine, [{**row, f"forward_{unit}": "12.34", f"backward_{unit}": "345.6"}])
            check(label in lines[0] and lines[-1] == "| B1 NH2 T3 HS4 fp32 | 12.3 / 346 |", lines)
    with test("bench.py --readme: the deterministic backward, beside the usual one where that is of the same session"):
        columns = "kernel,B,NH,T,HS,dtype,layout,forward_ms,backward_ms,forward_tflops,backward_tflops,of_bound\n"
        sizes, first = "16,12,1024,64,bf16,packed,0.1,", f"# 2026-11-30, commit 1234567, {MACHINE} 13.0; "
        results, marks = path("tree", "dev", "results"), [f"<!-- bench {name} -->\n" for name in bench.README_TABLES]
        os.makedirs(os.path.join(results, "nvidia-h200"))

        def readme(usual, deterministic):
            """README.md's block, of tables that begin with these lines."""
            for name, line, times in (("torch", usual, (0.3, 0.35)), ("deterministic", deterministic, (0.39, 0.45))):
                with open(os.path.join(results, "nvidia-h200", f"attention_{name}.csv"), "w") as file:
                    file.write(f"{line}of a test\n{columns}flash_mma,{sizes}{times[0]},200,100,\nPyTorch flash,{sizes}"
                               f"{times[1]},200,100,\nPyTorch cudnn,{sizes}0.2,0,0,nan\n")
            with open(path("tree", "README.md"), "w") as file:
                file.write("".join(f"{mark}old\n<!-- end -->\nkept\n" for mark in marks))
            kept, bench.ROOT = bench.ROOT, path("tree")
            try:
                bench.write_readme()
            finally:
                bench.ROOT = kept
            with open(path("tree", "README.md")) as file:
                text = file.read()
            check("old" not in text and text.count("kept") == len(marks) and "| 200 / 100 | 200 / 100 |" in text, text)
            return text.partition("<!-- bench attention_deterministic -->\n")[2].partition("<!-- end -->")[0].splitlines()
        title = "nvidia-h200, ms of the deterministic backward, commit 1234567"
        lines = readme(first, first)
        wanted = ["| shape | `flash_mma` | `flash_mma` usually | `flash_mma` times as long | `PyTorch flash` |",
                  "|---|---|---|---|---|", "| B16 NH12 T1024 HS64 bf16 packed | 0.390 | 0.300 | 1.30 | 0.450 |"]
        check(lines == [f"{title}:", "", *wanted], lines)
        for other in (first.replace("1234567", "89abcde"), first.replace("-30", "-29"), first.replace("13.0", "13.1")):
            lines = readme(other, first)
            check(lines == [f"{title} (the usual one, above, is of {other.split()[3].rstrip(',')}):", "",
                            "| shape | `flash_mma` | `PyTorch flash` |", "|---|---|---|",
                            "| B16 NH12 T1024 HS64 bf16 packed | 0.390 | 0.450 |"], lines)
        os.remove(os.path.join(results, "nvidia-h200", "attention_torch.csv"))
        kept, bench.ROOT = bench.ROOT, path("tree")
        try:
            rows = bench.read_rows(os.path.join(results, "nvidia-h200", "attention_deterministic.csv"))
            lines = bench.deterministic_table("nvidia-h200", rows)
        finally:
            bench.ROOT = kept
        check(lines[0] == f"{title}:" and len(lines) == 5, lines)
    with test("bench.py: the trainer on a GPU, with and without graph, a kernel by name, memory as nvidia-smi has it"):
        status, output = bench_tiny("--device", "cuda", "--no-torch", "--attention", "reference", "--attention", "nowhere")
        check(status is None, status, output)
        check("--attention nowhere, left out: " in output, output)
        rows = bench.read_rows(path("nvidia-h200-trainer.csv"))
        check([(row["what"], row["attention"]) for row in rows] == [(what, kernel) for what in ("tiny", "other")
                                                                    for kernel in ("tiled", "reference")], rows)
        for row in rows:
            check(row["peak GiB"] == "0.5" and float(row["ms"]) >= float(row["best ms"]) > 0, row)
            check(bool(row["ms without graph"]) == (row["what"] == "tiny"), row)
        with open(path("nvidia-h200-trainer.csv")) as file:
            check(re.match(rf"# \d+-\d+-\d+, commit \S+, {MACHINE} \S+; ", file.readline()), "its first line")
    with test("bench.py: a selection replaces its own rows, unless the others are of another machine"):
        name = path("nvidia-h200-trainer.csv")
        before = bench.read_rows(name)
        status, output = bench_tiny("--device", "cuda", "--no-torch", "--only", "^tiny fp32")
        rows = bench.read_rows(name)
        check(status is None and len(rows) == 4, status, output, rows)
        check([row for row in rows if row["what"] == "other"] == before[2:], rows)
        with open(name) as file:
            text = file.read()
        with open(name, "w") as file:
            older = re.sub(r"^# .*?, commit .*?,(.*?);.*", r"# then, commit it,\1", text)
            file.write(older.replace(rows[-1]["measured"], ""))
        status, output = bench_tiny("--device", "cuda", "--no-torch", "--only", "^tiny fp32")
        check([row["measured"] for row in bench.read_rows(name) if row["what"] == "other"] == 2 * ["then it"], output)
        with open(name, "w") as file:
            file.write(text.replace("driver 580.1", "driver 579"))
        status, output = bench_tiny("--device", "cuda", "--no-torch", "--only", "^tiny fp32")
        check(len(bench.read_rows(name)) == 1 and "579" in output, output)
    with test("bench.py: text is written with and without the cache, the same tokens"):
        status, output = bench_tiny("--device", "cpu", "--only", "^generate little")
        check(status is None, status, output)
        rows = bench.read_rows(path(f"{bench.machine_name()}-generate.csv"))
        check([row["what"] for row in rows] == ["little", "little, twice"], rows, output)
        for row, both in zip(rows, (True, False)):
            check(float(row["tokens/s"]) > 0 and bool(row["tokens/s without cache"]) == both == bool(row["times faster"]),
                  row)
        right = bench.run_generate
        bench.run_generate = lambda *given: (["x"], 2.0, 1) if "--no-cache" in given else right(*given)
        try:
            status, output = bench_tiny("--device", "cpu", "--only", "^generate little fp32")
        finally:
            bench.run_generate = right
        check("without" in str(status), "other tokens without the cache are not an error:", status, output)
    with test("bench.py: a selection of nothing, and what is no regular expression"):
        status, output = bench_tiny("--device", "cuda", "--only", "nowhere")
        check("'nowhere' matches no configuration" in str(status), status, output)
        status, output = bench_tiny("--only", "(")
        check(status == 2 and "regular expression" in output, status, output)


def test_torch_steps():
    with test("bench_torch.py: the steps of a model, as many as were asked for"):
        if not torch:
            skip("no PyTorch")
        done = subprocess.run([sys.executable, os.path.join(ROOT, "dev", "bench_torch.py"), *"--layers 1 --heads 2 --dim 16 "
                               "--vocab 97 --seq 8 --batch 2 --warm 1 --steps 3 --device cpu".split()], capture_output=True,
                              text=True)
        check(done.returncode == 0, done.stderr)
        times = json.loads(done.stdout.splitlines()[-1])["ms"]
        check(len(times) == 3 and min(times) > 0, times)
        done = subprocess.run([sys.executable, os.path.join(ROOT, "dev", "bench_torch.py"), "--dtype", "fp8"],
                              capture_output=True, text=True)
        check(done.returncode == 2 and "fp8" in done.stderr and done.stderr.count("\n") == 1, done.stderr)


# --- dev/profile_step.py ------------------------------------------------------------------------------------------------

def made_up_step(L, chunks):
    """(name, nanoseconds, bytes, range) of the kernels of a step, as they come in layers/gpt.c."""
    product = "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NTT"
    loss = ("void loss_kernel<__nv_bfloat16, (int)8>(float *, T1 *, int)", 60, 120, "")
    norm = ("void layernorm_kernel<__nv_bfloat16>(T1 *)", 20, 40, "")
    columns = "void column_sums_kernel<__nv_bfloat16, (int)8>(float *, const T1 *, long, long)"
    dot, flash = "void (anonymous namespace)::dot_kernel<(int)64>(float *)", "void flash_forward_kernel<64>(T1)"
    layer = [(product, 300, 10, "qkv forward"), (flash, 50, 5, "attention forward"), (product, 100, 10, "proj forward"), norm,
             (product, 400, 10, "fc forward"), (product, 400, 10, "fcproj forward"), norm]
    rest = "void cublasLt::splitKreduce_kernel<(int)32>(cublasLt::cublasSplitKParams<T>)"
    head = [(product, 700, 10, "head forward"), loss, (product, 700, 10, "head backward input"),
            (product, 600, 10, "head backward weight"), (rest, 100, 10, "head backward weight")]
    back = [launch for what, nanoseconds in (("fcproj", 400), ("fc", 400), ("proj", 100), ("qkv", 300))
            for launch in ((product, nanoseconds, 10, f"{what} backward weight"), (columns, 10, 10, f"{what} backward weight"),
                           (product, nanoseconds, 10, f"{what} backward input"),
                           *({"fc": [norm], "qkv": [norm], "proj": [(dot, 10, 5, "attention backward"),
                                                                    (flash, 110, 5, "attention backward")]}.get(what, [])))]
    update = ("void adamw_kernel<__nv_bfloat16, (int)4>(T1 *, float *)", 200, 800, "")
    return layer * L + head * chunks + back * L + [update]


def ncu_csv(kernels, time_unit="ns", byte_unit="byte"):
    """Kernels, (name, time, bytes, perhaps a range), as ncu prints them, with what it prints around."""
    lines = ["==PROF== Connected to process 12 (/x/train_gpt)",
             '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
             '"Device","CC","thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg",'
             '"dram__bytes.sum","gpu__time_duration.sum"',
             f'"","","","","","","","","","","","","{byte_unit}","{time_unit}"']
    for i, (name, nanoseconds, count, *place) in enumerate(kernels):
        ranges = "".join(f" <default domain>:{at}:none:none:none:none:ASCII:{at}" for at in ("update", "launch", *place) if at)
        lines.append(f'"{i}","12","train_gpt","127.0.0.1","{name}","1","7","(256, 1, 1)","(80, 2, 1)","0","9.0","{ranges}",'
                     f'"{count:,}","{nanoseconds:,}"')
    return "\n".join(lines + ["==PROF== Disconnected from process 12"])


def test_ncu():
    with test("profile_step.py: ncu's table, its units, and commas between thousands"):
        launches = profile_step.parse_ncu(ncu_csv([("a<1>(int)", 12345678, 5, "fcproj forward"), ("b", 2, 4000)],
                                                      "us", "Kbyte"))
        check([(launch.name, launch.grid, launch.range) for launch in launches] ==
              [("a<1>(int)", "(80, 2, 1)", "fcproj forward"), ("b", "(80, 2, 1)", "")], launches)
        check(math.isclose(launches[0].seconds, 12.345678) and launches[1].bytes == 4e6, launches)
        for text, words in (("==ERROR== The application returned an error code (1).", "(1)"), ("", "nothing"),
                            (ncu_csv([("a", 1, 1)]).replace("dram__bytes.sum", "x"), "no column 'dram__bytes.sum'"),
                            (ncu_csv([("a", 1, 1)], "fortnight"), "'fortnight'"),
                            (ncu_csv([("a", 1, 1)]).replace('"1","1"\n', '"n/a","1"\n'), "'n/a'")):
            try:
                profile_step.parse_ncu(text)
                check(False, "taken:", text)
            except bench.Failed as failure:
                check(words in str(failure), failure)
    with test("profile_step.py: names of kernels"):
        for name, short in (("void (anonymous namespace)::f_kernel<__nv_bfloat16, (int)128, (bool)1>(T1 *, int)",
                             "f_kernel<bf16, 128, 1>"), ("nvjet_tst_128x256", "nvjet_tst_128x256"),
                            ("void a::b<c<int>, float (*)(float)>(x (*)[3])", "a::b<c<int>, float (*)(float)>"),
                            ("k" * 90, "k" * 57 + "...")):
            check(profile_step.shorten(name) == short, profile_step.shorten(name))
    with test("profile_step.py: a step ends with its update, or the profile is refused"):
        launch = [profile_step.Launch(name, "", 0, 0, place) for name, _, _, place in made_up_step(1, 1)]
        n = len(launch)
        check(profile_step.last_step(2 * launch) == launch, n)
        try:
            profile_step.last_step([launch[0]] * 4 + 2 * launch)
            check(False, "steps of different launches are taken")
        except bench.Failed as failure:
            check(f"{n + 4} launches" in str(failure), failure)
        for wrong in (launch, 3 * launch, 2 * launch + launch[:1], []):
            try:
                profile_step.last_step(wrong)
                check(False, f"{len(wrong)} launches were taken for two steps of {n}")
            except bench.Failed as failure:
                check("adamw_kernel" in str(failure), failure)


def test_counters():
    import attention_counters
    metrics = [metric for _, metric, _ in attention_counters.METRICS] + list(attention_counters.CONFLICTS)
    values = ["1,500,000", "50.5", "10", "60", "30", "12", "255", "150,528", "5", "100"]

    def line(name):
        return ",".join(f'"{x}"' for x in ("0", name, *values))
    head = ",".join(f'"{x}"' for x in ("ID", "Kernel Name", *metrics))
    calls = [{"operator": "a", "way": way, "B": 1, "NH": 2, "T": 3, "HS": 8, "packed": True, "dtype": "bf16"}
             for way in ("forward", "backward")]
    mark = line("at::cuda::spin_kernel(long)")
    with test("attention_counters.py: a line a launch, with the call that it belongs to"):
        launches = [mark, line("void <unnamed>::first_kernel<(int)64>(x)"), mark, line("second(y)"), line("third")]
        rows = attention_counters.read_counters("\n".join(["==PROF==", head, head, *launches]), calls)
        found = [(row["way"], row["kernel"]) for row in rows]
        check(found == [("forward", "first_kernel"), ("backward", "second"), ("backward", "third")], found)
        check(rows[0]["ms"] == "1.5" and rows[0]["KB"] == "147" and rows[0]["conflicts"] == "5", rows[0])
        check(set(rows[0]) == set(attention_counters.COLUMNS), rows[0])
    with test("attention_counters.py: no counters, or launches that belong to no call, are one sentence"):
        for text in ("", "==ERROR== no rights", "\n".join([head, head, line("lost")]), "\n".join([head, head] + [mark] * 3 +
                                                                                              [line("one too many")])):
            try:
                attention_counters.read_counters(text, calls)
                check(False, f"taken: {text}")
            except bench_attention.Fault as fault:
                check(str(fault).startswith("ncu "), fault)
    with test("attention_counters.py: a CSV that cannot be written is one sentence"):
        write_script("ncu", f"""#!{sys.executable}
import sys
open(sys.argv[-1], "w").write({json.dumps(calls)!r})
print({chr(10).join([head, head, mark, line("first"), mark, line("second")])!r})
""")
        before = os.environ["PATH"]
        os.environ["PATH"] = path("bin") + os.pathsep + before
        try:
            for out, words in BAD_TARGETS:
                status, output = call(attention_counters.main, ["--out", out])
                sentence = f"\nattention_counters.py: {out}: cannot be written: {words}\n"
                check(status == 1 and output.endswith(sentence), status, output)
        finally:
            os.environ["PATH"] = before
            os.remove(path("bin", "ncu"))


def test_without_torch():
    os.makedirs(path("block"))
    for package in ("torch", "numpy"):
        with open(path("block", package + ".py"), "w") as file:
            file.write("raise ImportError('blocked')\n")

    def run(*words):
        done = subprocess.run([sys.executable, os.path.join(ROOT, "dev", words[0]), *words[1:]], capture_output=True,
                              text=True, env={**os.environ, "PYTHONPATH": path("block")})
        return done.returncode, done.stdout, done.stderr

    for name, needs, wrong, words in (
            ("bench_attention.py", "PyTorch", "--shape=4,5", "got '4,5', expected B,NH,T,HS or"),
            ("attention_counters.py", "PyTorch", "--peers=nobody", "--peers: got 'nobody', expected some of"),
            ("reference.py", "PyTorch and numpy", "--lr=-3", "reference.py: --lr: got -3.0, expected at least 0\n"),
            ("reference.py", "PyTorch and numpy", "--seq=8", "reference.py: --seq 8 is longer than the context"),
            ("bench_torch.py", "PyTorch and numpy", "--dtype=fp8", "bench_torch.py: --dtype: got 'fp8', expected one of")):
        some = ("--context=4", "--seq=4") if "numpy" in needs else ()
        with test(f"{name} {wrong}: without PyTorch it says what is wrong, gives --help, and says that it needs PyTorch"):
            status, _, errors = run(name, *some, wrong)
            check(status == 2 and words in errors and "PyTorch" not in errors, status, errors)
            status, output, errors = run(name, "--help")
            check(status == 0 and output.startswith("usage:") and not errors, status, errors)
            found = run(name, *some)
            check(found == (1, "", f"dev/{name} needs {needs}: blocked\n"), *found)


def test_rows():
    model = profile_step.Model(L=2, C=64, Vp=384, B=3, T=32)
    launches = profile_step.parse_ncu(ncu_csv(made_up_step(2, 3)))
    rows = {(row["part"], row["kernel"]): row for row in profile_step.make_rows(launches, model, 1e9, 1e12)}
    with test("profile_step.py: kernels add up, by part and by name"):
        total = sum(launch[1] for launch in made_up_step(2, 3))
        parts = [row for (_, kernel), row in rows.items() if not kernel]
        check(math.isclose(sum(float(row["ms"]) for row in parts), 1e-6 * total, abs_tol=3e-4), parts)
        check(sum(row["launches"] for row in parts) == len(launches), parts)
        check(rows["other", "column_sums_kernel<bf16, 8>"]["launches"] == 8, rows)
        check(rows["attention forward", ""]["launches"] == 2 and rows["attention backward", ""]["launches"] == 4, rows)
        check(rows["attention backward", "dot_kernel<64>"]["launches"] == 2, rows)
        check(rows["products", "head backward weight"]["launches"] == 6, "the sums of its parts belong to a product")
    with test("profile_step.py: floors by operations of products and attention, by bytes of the rest"):
        N, C, T = 3 * 32, 64, 32
        for key, seconds, floor in ((("products", "fc forward"), 2 * 400e-9, 2 * 2 * N * C * 4 * C / 1e12),
                                    (("products", "head forward"), 3 * 700e-9, 2 * N * C * 384 / 1e12),
                                    (("attention forward", ""), 2 * 50e-9, 2 * 4 * N * T * C / 2 / 1e12),
                                    (("attention backward", ""), 2 * 120e-9, 2 * 2.5 * 4 * N * T * C / 2 / 1e12),
                                    (("other", "adamw_kernel<bf16, 4>"), 200e-9, 800 / 1e9)):
            check(rows[key]["of floor"] == f"{100 * floor / seconds:.0f}%", key, rows[key], floor)
        check(not rows["attention forward", "flash_forward_kernel<64>"]["of floor"], "a part of attention has a floor")
    with test("profile_step.py: products outside of the ranges keep the names of their kernels"):
        launches = profile_step.parse_ncu(ncu_csv([("sm90_xmma_gemm_bf16", 5, 5)]))
        rows = profile_step.make_rows(launches, model, 1e9, 1e12)
        check([(row["part"], row["kernel"], row["of floor"]) for row in rows] ==
              [("products", "", ""), ("products", "sm90_xmma_gemm_bf16", "")], rows)
    with test("profile_step.py: the ranges are those of layers/gpt.c"):
        with open(os.path.join(ROOT, "layers", "gpt.c")) as file:
            found = re.findall(r'"((?:qkv|proj|fc|fcproj|head|attention) (?:forward|backward[ a-z]*))"', file.read())
        check(set(found) == set(profile_step.RANGES), set(found) ^ set(profile_step.RANGES))


def test_profile():
    write_script("ncu", f"""#!{sys.executable}
import sys
sys.path[:0] = [{HERE!r}, {os.path.join(ROOT, 'dev')!r}]
words = sys.argv[1:]
import test_bench
kernels = test_bench.made_up_step(1, 2) * (int(words[-1]) - 1)
if words[words.index("--nvtx-include") + 1] != "update/":
    kernels = [("setup_kernel", 1, 1)] * 3 + test_bench.made_up_step(1, 2) + kernels
text = test_bench.ncu_csv(kernels)
open(words[words.index("--log-file") + 1], "w").write(text)
""")
    with test("profile_step.py: measures the steps behind the first, writes table and CSV"):
        kept, bench.TRAIN = bench.TRAIN, path("bin", "train_gpt")
        arguments = ["--bandwidth", "4000", "--out", path("profile.csv"), "--dtype=fp32", "--model=",
                     *"--layers 1 --heads 2 --dim 16 --vocab 257 --seq 32 --batch 2".split()]
        try:
            status, output = call(profile_step.main, arguments)
        finally:
            bench.TRAIN = kept
        check(status is None, status, output)
        rows = bench.read_rows(path("profile.csv"))
        check(sum(int(row["launches"]) for row in rows if not row["kernel"]) == len(made_up_step(1, 2)), rows)
        check("setup_kernel" not in {row["kernel"] for row in rows}, rows)
        check(bench.profile_table("x", rows)[-1].startswith("| "), rows)
    with test("profile_step.py: what it cannot do is one sentence"):
        status, output = call(profile_step.main, ["--batch-tokens", "65536"])
        check(status == 2 and "--batch-tokens" in output.splitlines()[-1], status, output)
        kept, bench.ROOT = bench.ROOT, path("nowhere")
        try:
            status, output = call(profile_step.main, [])
        finally:
            bench.ROOT = kept
        check("layers.csv has no rate of a copy" in str(status), status)


# --- dev/gpu_test.sh ----------------------------------------------------------------------------------------------------

def sanitize(tool, name, answer):
    """(exit status, lines of the report) of `gpu_test.sh sanitize` where `tool` answers so over `name`, else well."""
    write_script("compute-sanitizer", f"""#!/bin/sh
case "$*" in
    *"--tool {tool} "*"{name}"*) {answer} ;;
    *) [ "$FLASHGPT_GPU_ONLY" = 1 ] && echo "========= ERROR SUMMARY: 0 errors" ;;
esac
""")
    with open(path("report.txt"), "w") as file:
        file.write("as it was\n")
    done = subprocess.run(["sh", os.path.join(ROOT, "dev", "gpu_test.sh"), "sanitize"], capture_output=True, text=True,
                          env={**os.environ, "REPORT": path("report.txt"), "SANITIZER_SECONDS": "4",
                               "PYTHON": sys.executable})
    with open(path("report.txt")) as file:
        lines = file.read().splitlines()
    check(lines[:3] == ["as it was", "", "== compute-sanitizer"], lines, done.stderr)
    return done.returncode, lines[3:]


def test_sanitize():
    with test("gpu_test.sh: a line in the report for each tool of compute-sanitizer"):
        status, lines = sanitize("none", "none", "")
        check(status == 0 and [line.split(":")[0] for line in lines[:3]] ==
              [f"ok   compute-sanitizer {tool}" for tool in ("memcheck", "racecheck", "initcheck")], status, lines)
        check(lines[3:] == ["   3 passed, 0 failed, 0 skipped"], lines)
        for name in ("train_gpt bf16", "train_gpt fp32", "test_attention", "test_cuda_gpt", "test_cuda_layers",
                     "test_decode"):
            check(name in lines[0], name, lines)
            check(name in lines[1] or name == "test_cuda_gpt", name, lines)
    for what, answer, words in (("what it found", "echo '========= RACECHECK SUMMARY: 3 hazards'; exit 99", "3 hazards"),
                                ("that it did not finish", "sleep 20", "did not finish"),
                                ("that it told nothing", "exit 0", "without a summary"),
                                ("that the program failed", "echo wrong >&2; exit 1", "failed: wrong")):
        with test(f"gpu_test.sh: the line of a tool says {what}"):
            status, lines = sanitize("racecheck", "test_cuda_layers", answer)
            start = "FAIL compute-sanitizer racecheck: test_cuda_layers: "
            check(status == 1 and lines[1].startswith(start) and words in lines[1], status, lines)
            check(lines[0].startswith("ok") and lines[2].startswith("ok") and "2 passed, 1 failed" in lines[3], lines)


def main():
    test_program()
    if torch:
        test_truth()
        test_judgement()
        test_attention_runs()
        test_peers()
        test_counters()
    else:
        with test("bench_attention.py"):
            skip("no Python with PyTorch")
    test_without_torch()
    write_gpu()
    test_bench()
    test_torch_steps()
    test_ncu()
    test_rows()
    test_profile()
    test_sanitize()
    FOLDER.cleanup()
    end()


if __name__ == "__main__":
    main()
