#!/usr/bin/env python3
"""Measures the trainer as a whole and runs the bench programs: `make bench` calls it.

    python3 dev/bench.py [BENCH_PROGRAM ...]
    python3 dev/bench.py --readme        writes the tables of README.md anew from dev/results, and measures nothing

For each configuration in CONFIGURATIONS it trains a few steps on random tokens and reports the median time of a step, tokens
a second, and the peak resident memory beside the plan that the trainer printed. Where PyTorch is importable the same steps
run through dev/reference.py in the same session, and the ratio is given. data/prepare.py is timed on a text made here.
Results go to stdout and to dev/results/<machine>/trainer.csv, with commit and date. Environment: TRAIN, the binary (default
./train_gpt).
"""
import argparse
import array
import csv
import datetime
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAIN = os.path.join(ROOT, os.environ.get("TRAIN", "train_gpt"))

# name, options, steps, steps of the twin (0: too slow to be worth it)
CONFIGURATIONS = [
    ("4 layers, 128 wide, bytes, B12 T64", "--layers 4 --heads 4 --dim 128 --vocab 257 --seq 64 --batch 12", 200, 30),
    ("6 layers, 384 wide, bytes, B8 T256", "--layers 6 --heads 6 --dim 384 --vocab 257 --seq 256 --batch 8", 12, 6),
    ("GPT-2 124M, B4 T64", "--model gpt2 --vocab 50257 --seq 64 --batch 4", 12, 6),
    ("GPT-2 124M, B1 T1024", "--model gpt2 --vocab 50257 --seq 1024 --batch 1", 4, 0),
]


def machine_name():
    """A folder name for the CPU: "cpu-amd-epyc"."""
    name = "unknown"
    try:
        with open("/proc/cpuinfo") as info:
            name = re.search(r"model name\s*:\s*(.*)", info.read()).group(1)
    except (OSError, AttributeError):
        pass
    return "cpu-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def commit():
    """The commit measured, with a plus where the tree has changes."""
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def write_shard(path, vocab, count, seed):
    """A shard of random tokens in which low ones are more frequent, as in text."""
    generator = random.Random(seed)
    tokens = array.array("H", (int(vocab * generator.random() ** 3) for _ in range(count)))
    header = array.array("i", [20240520, 1, count] + [0] * 253)
    with open(path, "wb") as file:
        header.tofile(file)
        tokens.tofile(file)


def run_measured(command):
    """Runs a command; returns (output, seconds, peak resident bytes)."""
    start = time.time()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    if status:
        sys.exit(f"{' '.join(command)} failed:\n{output}")
    return output, time.time() - start, usage.ru_maxrss * 1024


def step_times(run):
    """Milliseconds of each step in a run's log, the first two left out: they touch memory for the first time."""
    with open(os.path.join(run, "log.jsonl")) as log:
        lines = [json.loads(line) for line in log]
    return [line["ms"] for line in lines if "ms" in line][2:]


def planned_bytes(output):
    """The total of the memory line that train_gpt printed."""
    number, unit = re.search(r"^memory .* = ([\d.]+) (MiB|GiB)$", output, re.M).groups()
    return float(number) * (2**20 if unit == "MiB" else 2**30)


def torch_python():
    """An interpreter that can import torch, or None."""
    for python in (sys.executable, "/usr/bin/python3"):
        if os.path.exists(python) and subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 0:
            return python
    return None


def bench_trainer(folder, rows):
    """One row for each configuration."""
    python = torch_python()
    shards = {}
    for name, options, steps, twin_steps in CONFIGURATIONS:
        words = options.split()
        vocab = int(words[words.index("--vocab") + 1])
        batch, seq = (int(words[words.index(word) + 1]) for word in ("--batch", "--seq"))
        if vocab not in shards:
            shards[vocab] = os.path.join(folder, f"train_{vocab}.bin")
            write_shard(shards[vocab], vocab, 200000, vocab)
        common = words + ["--train", shards[vocab], "--eval-every", "0", "--warmup", "0", "--save-every", "0"]
        run = tempfile.mkdtemp(dir=folder)
        output, _, peak = run_measured([TRAIN, *common, "--steps", str(steps), "--out", run])
        times = step_times(run)
        row = {"what": name, "ms": round(statistics.median(times), 2), "best ms": round(min(times), 2),
               "tokens/s": round(batch * seq / statistics.median(times) * 1e3),
               "planned MiB": round(planned_bytes(output) / 2**20, 1), "peak MiB": round(peak / 2**20, 1)}
        if python and twin_steps:
            twin = tempfile.mkdtemp(dir=folder)
            run_measured([python, os.path.join(ROOT, "dev", "reference.py"), *common, "--device", "cpu",
                          "--steps", str(twin_steps), "--out", twin])
            row["PyTorch ms"] = round(statistics.median(step_times(twin)), 2)
            row["times faster"] = round(row["PyTorch ms"] / row["ms"], 2)
        rows.append(row)
        print_row(row)


def bench_prepare(folder, rows):
    """Megabytes of text a second and core that data/prepare.py turns into byte shards."""
    text = os.path.join(folder, "text.txt")
    generator = random.Random(7)
    words = [bytes(generator.choice(b"etaoinshrdlu") for _ in range(generator.randint(1, 9))) for _ in range(5000)]
    block = b" ".join(generator.choice(words) for _ in range(200000)) + b"\n"
    with open(text, "wb") as file:
        for _ in range(400):
            file.write(block)
    megabytes = os.path.getsize(text) / 1e6
    cores = len(os.sched_getaffinity(0))
    _, seconds, peak = run_measured([sys.executable, os.path.join(ROOT, "data", "prepare.py"), "--text", text,
                                     "--tokenizer", "bytes", "--out", os.path.join(folder, "prepared")])
    row = {"what": f"prepare.py, bytes, {megabytes:.0f} MB on {cores} cores", "ms": round(1e3 * seconds, 1),
           "MB/s a core": round(megabytes / seconds / cores), "peak MiB": round(peak / 2**20, 1)}
    rows.append(row)
    print_row(row)


def print_row(row):
    print("  ".join(f"{value:<36}" if key == "what" else f"{key} {value}" for key, value in row.items()), flush=True)


def read_rows(path):
    """Rows of a CSV under dev/results; lines that begin with # are its remarks."""
    with open(path, newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def attention_table(machine, rows):
    """Forward / backward rates of every kernel, a line a shape."""
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    unit = "gflops" if machine.startswith("cpu") else "tflops"
    lines = [f"{machine}, {unit[0].upper()}FLOP/s forward / backward:", "",
             "| shape | " + " | ".join(f"`{kernel}`" for kernel in kernels) + " |", "|---|" + "---|" * len(kernels)]
    cells = {}
    for row in rows:
        shape = f"B{row['B']} NH{row['NH']} T{row['T']} HS{row['HS']} {row['dtype']}"
        rates = [float(row[f"{way}_{unit}"]) for way in ("forward", "backward")]
        texts = [f"{rate:.3g}" if rate < 100 else f"{rate:.0f}" for rate in rates]
        cells.setdefault(shape, {})[row["kernel"]] = " / ".join(texts)
    for shape, found in cells.items():
        lines.append(f"| {shape} | " + " | ".join(found.get(kernel, "") for kernel in kernels) + " |")
    return lines


def trainer_table(machine, rows):
    """The columns of trainer.csv that have anything in them."""
    columns = [column for column in rows[0] if any(row[column] for row in rows)]
    lines = [f"{machine}:", "", "| " + " | ".join(columns) + " |", "|---|" + "---|" * (len(columns) - 1)]
    return lines + ["| " + " | ".join(row[column] for column in columns) + " |" for row in rows]


def write_readme():
    """Replaces what stands between <!-- bench NAME --> and <!-- end --> by the tables of dev/results/*/NAME.csv."""
    path = os.path.join(ROOT, "README.md")
    with open(path) as file:
        text = file.read()
    for name, table in (("attention", attention_table), ("trainer", trainer_table)):
        lines = []
        for machine in sorted(os.listdir(os.path.join(ROOT, "dev", "results"))):
            source = os.path.join(ROOT, "dev", "results", machine, f"{name}.csv")
            if os.path.exists(source):
                lines += [*table(machine, read_rows(source)), ""]
        begin = text.index(f"<!-- bench {name} -->") + len(f"<!-- bench {name} -->\n")
        text = text[:begin] + "\n".join(lines) + text[text.index("<!-- end -->", begin):]
    with open(path, "w") as file:
        file.write(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="BENCH_PROGRAM", help="run first, from the repository's root")
    parser.add_argument("--readme", action="store_true", help="write the tables of README.md, and measure nothing")
    options = parser.parse_args()
    if options.readme:
        write_readme()
        return
    for program in options.programs:
        print(f"== {os.path.basename(program)}", flush=True)
        if subprocess.run([program], cwd=ROOT).returncode:
            sys.exit(f"{program} failed")
    rows = []
    folder = tempfile.mkdtemp(prefix="flashgpt-bench-")
    print("== trainer", flush=True)
    try:
        bench_trainer(folder, rows)
        bench_prepare(folder, rows)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    results = os.path.join(ROOT, "dev", "results", machine_name())
    os.makedirs(results, exist_ok=True)
    path = os.path.join(results, "trainer.csv")
    columns = ["what", "ms", "best ms", "tokens/s", "PyTorch ms", "times faster", "planned MiB", "peak MiB", "MB/s a core"]
    with open(path, "w", newline="") as file:
        file.write(f"# {datetime.date.today()}, commit {commit()}, {len(os.sched_getaffinity(0))} cores\n")
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {os.path.relpath(path, ROOT)}")


if __name__ == "__main__":
    main()
