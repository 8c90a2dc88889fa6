#!/usr/bin/env python3
"""Where a training step's time goes on a GPU, kernel by kernel, by Nsight Compute.

    python3 dev/profile_step.py [--out CSV] [--ncu PROGRAM] [--bandwidth GB/S] [OPTION OF TRAIN_GPT ...]
    python3 dev/profile_step.py --batch 64 --attention flash_simt

The options of train_gpt that are given go behind those of GPT-2 124M in bf16, 16 x 1024 tokens a step, and win over them.
Two runs: one without the profiler for the time of a step; one of three steps, of which ncu measures the second and the third
(by the trainer's ranges; the first tries products) and the table has the third. Kernels run one after another there, without
a graph, with clocks and caches as they come. Copies and memsets are no kernels, so they, and the gaps, are what the kernels
leave of the step; kernels that a graph does at the same time may add up to more than it.

Floors: a product, and attention as a whole, cannot take less than its operations at the GPU's peak (as train_gpt knows it;
causal attention counted by half); any other kernel not less than the bytes that it moved through DRAM, at the rate of a
large copy (--bandwidth, else what dev/results/<gpu>/layers.csv says). "of floor" is the floor's share of the time: 100% is
as fast as can be with what the kernel moves.

Products and attention are told by the ranges that layers/gpt.c puts around them, however many kernels a product takes.

The table goes to stdout and to dev/results/<gpu>/profile.csv. Exit status: 0, 1 where a run failed or ncu's output is not
what was expected, 2 for wrong arguments. Environment: TRAIN, the binary (default ./train_gpt).
"""
import argparse
import collections
import csv
import io
import os
import re
import shutil
import statistics
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import bench  # noqa: E402
from bench import Failed  # noqa: E402

STANDARD = "--model gpt2 --vocab 50257 --seq 1024 --batch 16 --dtype bf16".split()
TIME, BYTES = "gpu__time_duration.sum", "dram__bytes.sum"
LAST_KERNEL = "adamw_kernel"  # ends every step
STEPS = 30  # measured without the profiler, after as many warm ones as in the bench
SECONDS = {"ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3, "s": 1, "second": 1}
COUNTS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}
COLUMNS = ["part", "kernel", "launches", "ms", "share", "MB", "GB/s", "TFLOP/s", "floor ms", "of floor"]

# The ranges of layers/gpt.c: (what, way), and the operations of all products of a kind in units of 2 N C C a layer.
UNITS = {"qkv": 3, "proj": 1, "fc": 4, "fcproj": 4}
WAYS = ("forward", "backward input", "backward weight")
RANGES = [f"{what} {way}" for what in (*UNITS, "head") for way in WAYS] + ["attention forward", "attention backward"]
RANGE_COLUMN = "Push/Pop_Range"  # part of the name of the column in which ncu lists a launch's ranges

Launch = collections.namedtuple("Launch", "name grid seconds bytes range")
Model = collections.namedtuple("Model", "L C Vp B T")  # as in layers/backend.h


# --- ncu's output -------------------------------------------------------------------------------------------------------

def parse_number(text):
    """A number as ncu prints it, with commas between thousands; None where there is none."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def parse_ncu(text, metrics=(TIME, BYTES)):
    """Launches in ncu's `--csv --page raw` output, whatever else was printed around the table: names, grids, the metrics in
    seconds and bytes, and which of RANGES they are in ("": none). Failed where the table is not there, or a value is
    none."""
    start = text.find('"ID",')
    if start < 0:
        said = [line for line in text.splitlines() if line.startswith("==ERROR==")] or text.strip().splitlines()[-1:]
        raise Failed(f"ncu printed no table: {said[0] if said else 'nothing'}")
    lines = [line for line in text[start:].splitlines() if line.startswith('"')]
    rows = list(csv.reader(io.StringIO("\n".join(lines))))
    names, units, launches = rows[0], rows[1] if len(rows) > 1 else [], []
    for name in ("Kernel Name", "Grid Size", *metrics):
        if name not in names:
            raise Failed(f"ncu's table has no column '{name}', only {', '.join(names)}")
    factor = {}
    for metric in metrics:
        unit = units[names.index(metric)] if units else ""
        factor[metric] = {**SECONDS, **COUNTS}.get(unit)
        if factor[metric] is None and metric in (TIME, BYTES):
            raise Failed(f"ncu gives {metric} in '{unit}', expected one of {', '.join([*SECONDS, *COUNTS])}")
    places = [i for i, name in enumerate(names) if RANGE_COLUMN in name]
    known = re.compile(r"(?<!\w)(?:" + "|".join(RANGES) + r")(?!\w)")
    for row in rows[2:]:
        found = known.search(" ".join(row[i] for i in places if i < len(row)))
        values = dict(zip(names, row))
        numbers = {metric: parse_number(values.get(metric, "")) for metric in metrics}
        for metric, number in numbers.items():
            if number is None:
                raise Failed(f"ncu's launch {values['ID']} has {metric} '{values.get(metric)}', expected a number")
        launches.append(Launch(values["Kernel Name"], values["Grid Size"], numbers.get(TIME, 0) * factor.get(TIME, 1),
                               numbers.get(BYTES, 0) * factor.get(BYTES, 1), found.group() if found else ""))
    return launches


def shorten(name):
    """A demangled kernel name without return type, parameters and namespaces of no name: softmax_kernel<bf16, 128>."""
    name = name.replace("(anonymous namespace)::", "").replace("__nv_bfloat16", "bf16")
    name = re.sub(r"\((?:int|unsigned int|bool|long|unsigned long)\)", "", name)
    name = re.sub(r"^(?:void|static) ", "", name)
    depth = 0
    for i, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            name = name[:i]
            break
    return name if len(name) <= 60 else name[:57] + "..."


def last_step(launches):
    """The launches of the second of two steps, which are alike."""
    ends = [i for i, launch in enumerate(launches) if LAST_KERNEL in launch.name]
    if len(ends) != 2 or ends[1] != len(launches) - 1:
        raise Failed(f"{LAST_KERNEL} is launch {', '.join(map(str, ends)) or 'none'} of {len(launches)} in two steps, "
                     "expected two, one of them the last: dev/profile_step.py no longer knows what ends a step")
    steps = launches[:ends[0] + 1], launches[ends[0] + 1:]
    if len(steps[0]) != len(steps[1]):
        raise Failed(f"the second step has {len(steps[0])} launches and the third {len(steps[1])}, expected as many")
    return steps[1]


# --- what the launches are ----------------------------------------------------------------------------------------------

def is_product(name):
    """Whether a kernel is cuBLAS's: its products, and what it launches to add up their parts."""
    return bool(re.search(r"nvjet|gemm|gemv|xmma|cutlass|splitK|reduce_1Block|cublasLt::", name))


def label(launch):
    """(part, name) of a launch; the parts are "products", "attention forward", "attention backward" and "other". What a
    product needs beside it (sums of columns, a GELU) is other."""
    name = shorten(launch.name)
    if launch.range.startswith("attention"):
        return launch.range, name
    if is_product(launch.name):
        return "products", launch.range or name
    return "other", name


def operations_of(name, model):
    """Operations of all launches of a product, or part, in a step; 0 where they do not count."""
    N, C, L = model.B * model.T, model.C, model.L
    what, _, way = name.partition(" ")
    if what == "attention":
        return 4.0 * N * model.T * C / 2 * L * (1 if way == "forward" else 2.5)
    if what == "head" and way in WAYS:
        return 2.0 * N * C * model.Vp
    return 2.0 * N * C * C * UNITS[what] * L if what in UNITS and way in WAYS else 0


def make_rows(launches, model, bandwidth, peak):
    """Rows of the table: the parts with their kernels below, the longest first. bandwidth in bytes, peak in operations a
    second (0: not known)."""
    Sum = collections.namedtuple("Sum", "launches seconds bytes")
    sums, total = {}, sum(launch.seconds for launch in launches)
    for launch in launches:
        part, name = label(launch)
        for key in ((part, ""), (part, name)):
            before = sums.get(key, Sum(0, 0, 0))
            sums[key] = Sum(before.launches + 1, before.seconds + launch.seconds, before.bytes + launch.bytes)
    rows = []
    for (part, name), found in sorted(sums.items(), key=lambda item: (-sums[item[0][0], ""].seconds, item[0][1] != "",
                                                                      -item[1].seconds)):
        work, moved = operations_of(name or part, model), found.bytes / bandwidth
        if part == "products" and not name:
            work = sum(operations_of(other, model) for other_part, other in sums if other_part == part)
        # Attention is bound by its products as a whole; of its kernels alone that cannot be said.
        floor = work / peak if work and peak else moved if part == "other" else None
        rows.append({"part": part, "kernel": name, "launches": found.launches, "ms": f"{1e3 * found.seconds:.4f}",
                     "share": f"{100 * found.seconds / total:.1f}%", "MB": f"{1e-6 * found.bytes:.1f}",
                     "GB/s": f"{1e-9 * found.bytes / found.seconds:.0f}",
                     "TFLOP/s": f"{1e-12 * work / found.seconds:.0f}" if work else "",
                     "floor ms": "" if floor is None else f"{1e3 * floor:.4f}",
                     "of floor": "" if floor is None else f"{100 * floor / found.seconds:.0f}%"})
    return rows


# --- runs ---------------------------------------------------------------------------------------------------------------

def value_of(words, option):
    """The last value of a count among options of train_gpt."""
    value = [following for word, following in zip(words, words[1:]) if word == option][-1]
    if not value.isdigit():
        raise Failed(f"{option}: got '{value}', expected a number")
    return int(value)


def run_ncu(options):
    """The launches of the second and the third step."""
    folder = tempfile.mkdtemp(prefix="flashgpt-profile-")
    log = os.path.join(folder, "ncu.csv")
    command = [options.ncu, "--csv", "--page", "raw", "--print-units", "base", "--print-kernel-base", "demangled",
               "--clock-control", "none", "--cache-control", "none", "--metrics", f"{TIME},{BYTES}", "--log-file", log,
               "--nvtx", "--nvtx-include", "update/", bench.TRAIN, *options.train, "--no-graph", "--steps", "3"]
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # else the trainer starts itself anew to set it, and ncu may lose it
    try:
        bench.run_measured(command)
        with open(log) as file:
            return parse_ncu(file.read())
    except OSError:
        raise Failed(f"{options.ncu} wrote no {log}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_plain(options, folder):
    """(milliseconds of a step, model, peak operations a second or 0, the kernel's name) of a run without the profiler."""
    run = os.path.join(folder, "run")
    output, _, _ = bench.run_measured([bench.TRAIN, *options.train, "--steps", str(bench.GPU_WARM + STEPS), "--out", run])
    milliseconds = statistics.median(bench.read_steps(run, "ms", bench.GPU_WARM))
    sizes = re.search(r"^model    (\d+) layers, \d+ heads, (\d+) wide, context \d+, vocabulary (\d+):", output, re.M)
    L, C, V = map(int, sizes.groups())
    B, T = map(int, re.search(r"^run .* of (\d+) x (\d+)\)", output, re.M).groups())
    model = Model(L, C, -(-V // 128) * 128, B, T)
    share = bench.read_steps(run, "mfu", bench.GPU_WARM)[-1]
    # train_gpt's share of the peak is of 6 N + 12 L C T operations a token (model_tflops in train_gpt.cu).
    parameters = V * C + L * (12 * C * C + 13 * C) + 2 * C
    rate = (6 * parameters + 12 * L * C * T) * bench.read_steps(run, "tokens_per_second", bench.GPU_WARM)[-1]
    return (milliseconds, model, round(rate / share / 1e12, 1) * 1e12 if share else 0,
            re.search(r"^kernel   attention (\S+):", output, re.M).group(1))


def copy_bandwidth(machine):
    """Bytes a second of a large copy, read and written, as dev/bench_cuda_layers.c measured it."""
    path = os.path.join(bench.ROOT, "dev", "results", machine, "layers.csv")
    rows = bench.read_rows(path) if os.path.exists(path) else []
    rates = [float(row["rate"]) for row in rows if row["operation"] == "copy"]
    if not rates:
        raise Failed(f"{path} has no rate of a copy: run build/dev/bench_cuda_layers, or give --bandwidth")
    return 1e9 * max(rates)


def print_table(rows):
    print(f"{'':48}{'launches':>9}{'ms':>10}{'share':>8}{'MB':>10}{'GB/s':>7}{'TFLOP/s':>9}{'floor ms':>10}{'of floor':>10}")
    for row in rows:
        title = f"  {row['kernel']}" if row["kernel"] else row["part"]
        print(f"{title:<48.48}{row['launches']:>9}{row['ms']:>10}{row['share']:>8}{row['MB']:>10}{row['GB/s']:>7}"
              f"{row['TFLOP/s']:>9}{row['floor ms']:>10}{row['of floor']:>10}")


def parse_options(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--out", metavar="CSV", help="default: dev/results/<gpu>/profile.csv")
    parser.add_argument("--ncu", default="ncu", metavar="PROGRAM", help="Nsight Compute's command line (default: ncu)")
    parser.add_argument("--bandwidth", type=float, metavar="GB/S", help="of a large copy, bytes read and written")
    options, given = parser.parse_known_args(arguments)
    if options.bandwidth is not None and not options.bandwidth > 0:
        parser.error(f"--bandwidth: got {options.bandwidth}, expected a number above 0")
    options.train = STANDARD + [part for word in given for part in (word.split("=", 1) if word[:2] == "--" else [word])]
    for option in ("--batch-tokens", "--recompute"):
        if option in options.train:
            parser.error(f"{option} makes a step of other launches than are known here")
    return options


def profile(options):
    machine = bench.machine_name("cuda")
    bandwidth = 1e9 * options.bandwidth if options.bandwidth else copy_bandwidth(machine)
    folder = tempfile.mkdtemp(prefix="flashgpt-profile-")
    try:
        shard = os.path.join(folder, "train.bin")
        bench.write_shard(shard, value_of(options.train, "--vocab"), 200000, 1)
        shown = " ".join(options.train)
        options.train += ["--train", shard, "--device", "cuda", "--eval-every", "0", "--save-every", "0", "--warmup", "0"]
        milliseconds, model, peak, attention = run_plain(options, folder)
        launches = last_step(run_ncu(options))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = make_rows(launches, model, bandwidth, peak)
    kernels = 1e3 * sum(launch.seconds for launch in launches)
    words = (f"{shown}, attention {attention}: a step takes {milliseconds:.3f} ms, its {len(launches)} kernels {kernels:.3f} ms one "
             f"by one; floors by {1e-9 * bandwidth:.0f} GB/s" + (f" and {1e-12 * peak:.0f} TFLOP/s" if peak else ""))
    print(words)
    print_table(rows)
    path = options.out or bench.results_path(machine, "profile.csv")
    with open(path, "w", newline="") as file:
        file.write(bench.header(bench.machine_words("cuda"), words))
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {path}")


def main(arguments):
    try:
        profile(parse_options(arguments))
    except Failed as failure:
        sys.exit(f"profile_step.py: {failure}")


if __name__ == "__main__":
    main(sys.argv[1:])
