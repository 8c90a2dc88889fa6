#!/usr/bin/env python3
"""Measures the trainer as a whole and runs the bench programs: `make bench` calls it.

    python3 dev/bench.py [--device cpu|cuda] [--only REGEX] [--attention NAME]... [BENCH_PROGRAM ...]
    python3 dev/bench.py --readme        writes the tables of README.md anew from dev/results, and measures nothing

For each configuration below it trains a few steps on random tokens and reports the median time of a step, tokens a second,
and the peak memory beside the plan that the trainer printed: resident memory on a CPU; on a GPU what its memory holds more
than before, the CUDA context included. Where PyTorch is importable the same model takes its steps in the same session, and
the ratio is given: on a CPU dev/reference.py, on a GPU dev/bench_torch.py, eager and compiled. data/prepare.py is timed on a
text made here. `train_gpt generate` writes behind a prompt of 1000 tokens with a GPT-2 of random weights, with its cache
and, once the tokens have turned out to be the same, without.

Results go to stdout and to dev/results/<machine>/trainer.csv and generate.csv: a run of everything replaces the files; of a
selection its own rows, as long as the others are of the same machine and software ("measured" has date and commit of each).
Environment: TRAIN, the binary (default ./train_gpt); FLASHGPT_COMMIT, where the tree has no git.
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
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAIN = os.path.join(ROOT, os.environ.get("TRAIN", "train_gpt"))

# On a CPU: name, options, steps, steps of the twin (0: too slow to be worth it). All in fp32.
CONFIGURATIONS = [
    ("4 layers, 128 wide, bytes, B12 T64", "--layers 4 --heads 4 --dim 128 --vocab 257 --seq 64 --batch 12", 200, 30),
    ("6 layers, 384 wide, bytes, B8 T256", "--layers 6 --heads 6 --dim 384 --vocab 257 --seq 256 --batch 8", 12, 6),
    ("GPT-2 124M, B4 T64", "--model gpt2 --vocab 50257 --seq 64 --batch 4", 12, 6),
    ("GPT-2 124M, B1 T1024", "--model gpt2 --vocab 50257 --seq 1024 --batch 1", 4, 0),
]
CPU_WARM = 2  # steps that are not counted: they touch memory for the first time

# On a GPU: name, options, type, whether it is also measured with --no-graph. The third line of nanoGPT's is its Shakespeare
# configuration, but for dropout and with bytes instead of characters.
GPT2, SHAKESPEARE = "--model gpt2 --vocab 50257 --seq 1024", "--layers 6 --heads 6 --dim 384 --vocab 257 --seq 256"
GPU_CONFIGURATIONS = [
    ("GPT-2 124M, B4 T1024", f"{GPT2} --batch 4", "bf16", True),
    ("GPT-2 124M, B16 T1024", f"{GPT2} --batch 16", "bf16", True),
    ("GPT-2 124M, B64 T1024", f"{GPT2} --batch 64", "bf16", False),
    ("GPT-2 124M, B16 T1024", f"{GPT2} --batch 16", "fp32", False),
    ("6 layers, 384 wide, bytes, B64 T256", f"{SHAKESPEARE} --batch 64", "bf16", True),
]
GPU_WARM, GPU_STEPS = 10, 30  # steps that are not counted, and that are
PREPARE = "prepare.py"

# What is written: name, model, tokens of the prompt, texts at the same time, whether also without the cache. With it so many
# tokens a text, without it so few.
GENERATE = [("GPT-2 124M, 1 text behind 1000 tokens", GPT2, 1000, 1, True),
            ("GPT-2 124M, 8 texts behind 1000 tokens", GPT2, 1000, 8, False)]
GENERATE_TOKENS, GENERATE_SLOW = 24, 4
GENERATE_DTYPES = {"cpu": ("fp32",), "cuda": ("fp32", "bf16")}
GENERATE_COLUMNS = ["what", "dtype", "tokens/s", "tokens/s without cache", "times faster", "ms for the prompt", "measured"]

CPU_COLUMNS = ["what", "ms", "best ms", "tokens/s", "PyTorch ms", "times faster", "planned MiB", "peak MiB", "MB/s a core",
               "measured"]
GPU_COLUMNS = ["what", "dtype", "attention", "ms", "best ms", "ms without graph", "tokens/s", "MFU", "PyTorch ms",
               "times faster", "compiled ms", "times compiled", "planned GiB", "peak GiB", "PyTorch GiB", "compiled GiB",
               "measured"]
KEY_COLUMNS = ("what", "dtype", "attention")


class Failed(Exception):
    """A command that failed, and the end of what it said."""


# --- the machine --------------------------------------------------------------------------------------------------------

def command_output(*command):
    """What a command prints, "" where it cannot be run or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def gpu_words():
    """Name and driver of the first GPU, or None where there is none."""
    lines = command_output("nvidia-smi", "-i", "0", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    name, _, driver = lines[0].partition(", ") if lines else ("", "", "")
    return (name, driver) if driver else None


def cpu_name():
    try:
        with open("/proc/cpuinfo") as info:
            return re.search(r"model name\s*:\s*(.*)", info.read()).group(1)
    except (OSError, AttributeError):
        return "unknown"


def machine_name(device="cpu"):
    """A folder name for the device: "cpu-amd-epyc", "nvidia-h200"."""
    name = f"cpu {cpu_name()}" if device == "cpu" else (gpu_words() or ("unknown gpu", ""))[0]
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def machine_words(device):
    """What a result was measured on."""
    if device == "cpu":
        return f"{len(os.sched_getaffinity(0))} cores"
    name, driver = gpu_words() or ("unknown GPU", "unknown")
    toolkit = re.search(r"release ([\d.]+)", command_output("nvcc", "--version"))
    return f"{name}, driver {driver}, CUDA {toolkit.group(1) if toolkit else 'unknown'}"


def commit():
    """The commit measured, with a plus where the tree has changes."""
    if os.environ.get("FLASHGPT_COMMIT"):
        return os.environ["FLASHGPT_COMMIT"]
    changed = command_output("git", "status", "--porcelain", "--untracked-files=no")
    return command_output("git", "rev-parse", "--short", "HEAD").strip() + ("+" if changed else "")


def header(words, explanation):
    """The first line of a CSV of results: `words` says on what it was measured."""
    return f"# {datetime.date.today()}, commit {commit()}, {words}; {explanation}\n"


def results_path(machine, name):
    """dev/results/MACHINE/NAME; makes the folder."""
    folder = os.path.join(ROOT, "dev", "results", machine)
    os.makedirs(folder, exist_ok=True)
    return os.path.join(folder, name)


# --- runs ---------------------------------------------------------------------------------------------------------------

class DeviceMemory:
    """Bytes that the first GPU's memory holds at most while this is open, beyond what it held before: .peak, None where
    nvidia-smi does not tell. It is asked anew each time: run in a loop it may keep what it prints to itself."""
    QUERY = ("nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    PAUSE = 0.1  # seconds between two questions

    def __enter__(self):
        self.samples, self.over = [self.used()], threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def used(self):
        """Now, in MiB; None where it is not told."""
        found = re.match(r"\d+", command_output(*self.QUERY))
        return int(found.group()) if found else None

    def watch(self):
        while not self.over.wait(self.PAUSE) and self.samples[0] is not None:
            self.samples.append(self.used() or 0)

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        self.peak = (max(self.samples) - self.samples[0]) * 2**20 if len(self.samples) > 1 else None


def write_shard(path, vocab, count, seed):
    """A shard of random tokens in which low ones are more frequent, as in text."""
    generator = random.Random(seed)
    tokens = array.array("H", (int(vocab * generator.random() ** 3) for _ in range(count)))
    header = array.array("i", [20240520, 1, count] + [0] * 253)
    with open(path, "wb") as file:
        header.tofile(file)
        tokens.tofile(file)


def run_measured(command):
    """Runs a command; returns (output, seconds, peak resident bytes). Failed where it does not succeed."""
    start = time.time()
    try:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise Failed(f"{command[0]} cannot be run: {error.strerror}") from None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    if status:
        raise Failed(f"{' '.join(command)} failed:\n{output[-2000:].strip()}")
    return output, time.time() - start, usage.ru_maxrss * 1024


def read_steps(run, key, left_out):
    """A number of each step in a run's log but for the first few."""
    with open(os.path.join(run, "log.jsonl")) as log:
        lines = [json.loads(line) for line in log]
    return [line[key] for line in lines if "ms" in line][left_out:]


def planned_bytes(output):
    """The total of the memory line that train_gpt printed."""
    number, unit = re.search(r"^memory .* = ([\d.]+) (MiB|GiB)$", output, re.M).groups()
    return float(number) * (2**20 if unit == "MiB" else 2**30)


def torch_python(device="cpu"):
    """(an interpreter whose PyTorch can use the device, that PyTorch's version), or (None, "")."""
    works = "import torch; print(torch.__version__)" + ("; torch.zeros(1, device='cuda')" if device == "cuda" else "")
    for python in (sys.executable, "/usr/bin/python3"):
        version = command_output(python, "-c", works).strip().split("+")[0]
        if version:
            return python, version
    return None, ""


def shard_of(folder, options):
    """A shard of random tokens for a configuration, made once for each vocabulary."""
    words = options.split()
    vocab = int(words[words.index("--vocab") + 1])
    path = os.path.join(folder, f"train_{vocab}.bin")
    if not os.path.exists(path):
        write_shard(path, vocab, 200000, vocab)
    return path


def tokens_of(options):
    """Tokens of a step."""
    words = options.split()
    return int(words[words.index("--batch") + 1]) * int(words[words.index("--seq") + 1])


def stamp():
    """When, and from what, a row was measured."""
    return f"{datetime.date.today()} {commit()}"


# --- the trainer on a CPU -----------------------------------------------------------------------------------------------

def bench_cpu(folder, wanted, rows):
    """One row for each configuration that is wanted(name)."""
    python, _ = torch_python()
    for name, options, steps, twin_steps in CONFIGURATIONS:
        if not wanted(f"{name} fp32 cpu"):
            continue
        common = [*options.split(), "--train", shard_of(folder, options), "--device", "cpu", "--eval-every", "0", "--warmup",
                  "0", "--save-every", "0"]
        run = tempfile.mkdtemp(dir=folder)
        output, _, peak = run_measured([TRAIN, *common, "--steps", str(steps), "--out", run])
        times = read_steps(run, "ms", CPU_WARM)
        row = {"what": name, "ms": round(statistics.median(times), 2), "best ms": round(min(times), 2),
               "tokens/s": round(tokens_of(options) / statistics.median(times) * 1e3),
               "planned MiB": round(planned_bytes(output) / 2**20, 1), "peak MiB": round(peak / 2**20, 1)}
        if python and twin_steps:
            twin = tempfile.mkdtemp(dir=folder)
            run_measured([python, os.path.join(ROOT, "dev", "reference.py"), *common, "--steps", str(twin_steps), "--out",
                          twin])
            row["PyTorch ms"] = round(statistics.median(read_steps(twin, "ms", CPU_WARM)), 2)
            row["times faster"] = round(row["PyTorch ms"] / row["ms"], 2)
        rows.append({**row, "measured": stamp()})
        print_row(rows[-1])


# --- the trainer on a GPU -----------------------------------------------------------------------------------------------

def gibibytes(count):
    return "" if count is None else round(count / 2**30, 2)


def measure_trainer(folder, options, *more):
    """Trains GPU_WARM + GPU_STEPS steps on the GPU; returns (milliseconds of those that count, MFU, output, peak bytes)."""
    run = tempfile.mkdtemp(dir=folder)
    command = [TRAIN, *options.split(), "--train", shard_of(folder, options), "--device", "cuda", "--eval-every", "0",
               "--warmup", "0", "--save-every", "0", "--steps", str(GPU_WARM + GPU_STEPS), "--out", run, *more]
    with DeviceMemory() as memory:
        output, _, _ = run_measured(command)
    shares = [share for share in read_steps(run, "mfu", GPU_WARM) if share is not None]
    return (statistics.median(read_steps(run, "ms", GPU_WARM)), statistics.median(shares) if shares else None,
            min(read_steps(run, "ms", GPU_WARM)), output, memory.peak)


def measure_torch(python, options, dtype, mode):
    """(median milliseconds, peak bytes) of PyTorch's steps, eager or compiled; (None, None) where it cannot."""
    command = [python, os.path.join(ROOT, "dev", "bench_torch.py"), *options.split(), "--dtype", dtype, "--mode", mode,
               "--device", "cuda", "--warm", str(GPU_WARM), "--steps", str(GPU_STEPS)]
    try:
        with DeviceMemory() as memory:
            output, _, _ = run_measured(command)
    except Failed as failure:
        print(f"  PyTorch, {mode}, left out: {str(failure).splitlines()[-1]}", flush=True)
        return None, None
    return statistics.median(json.loads(output.splitlines()[-1])["ms"]), memory.peak


def bench_gpu_row(folder, name, options, dtype, attention, without_graph):
    """The trainer's part of a row."""
    chosen = ["--dtype", dtype, "--attention", attention]
    median, share, best, output, peak = measure_trainer(folder, options, *chosen)
    row = {"what": name, "dtype": dtype, "attention": re.search(r"^kernel   attention (\S+):", output, re.M).group(1),
           "ms": round(median, 3), "best ms": round(best, 3), "tokens/s": round(tokens_of(options) / median * 1e3),
           "MFU": "" if share is None else f"{100 * share:.1f}%", "planned GiB": gibibytes(planned_bytes(output)),
           "peak GiB": gibibytes(peak), "measured": stamp()}
    if without_graph:
        row["ms without graph"] = round(measure_trainer(folder, options, *chosen, "--no-graph")[0], 3)
    return row


def bench_gpu(folder, wanted, attentions, python, rows):
    """A row for each wanted configuration and attention: "auto", then those asked for by name."""
    for name, options, dtype, without_graph in GPU_CONFIGURATIONS:
        if not wanted(f"{name} {dtype} cuda"):
            continue
        beside, found = {}, []
        for mode, title in (("eager", "PyTorch"), ("compiled", "compiled")) if python else ():
            milliseconds, peak = measure_torch(python, options, dtype, mode)
            if milliseconds:
                beside[f"{title} ms"], beside[f"{title} GiB"] = round(milliseconds, 3), gibibytes(peak)
        for attention in ["auto", *attentions]:
            try:
                row = bench_gpu_row(folder, name, options, dtype, attention, without_graph)
            except Failed as failure:
                if attention == "auto":
                    raise
                print(f"  {name}, {dtype}, --attention {attention}, left out: {str(failure).splitlines()[-1]}", flush=True)
                continue
            if row["attention"] in found:
                continue
            found.append(row["attention"])
            row.update(beside)
            for title, ratio in (("PyTorch", "times faster"), ("compiled", "times compiled")):
                if f"{title} ms" in row:
                    row[ratio] = round(row[f"{title} ms"] / row["ms"], 2)
            rows.append({column: row[column] for column in GPU_COLUMNS if column in row})
            print_row(rows[-1])


# --- the rest of the bench ----------------------------------------------------------------------------------------------

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
           "MB/s a core": round(megabytes / seconds / cores), "peak MiB": round(peak / 2**20, 1), "measured": stamp()}
    rows.append(row)
    print_row(row)


# --- writing text -------------------------------------------------------------------------------------------------------

def run_generate(model, prompt, device, dtype, texts, tokens, *more):
    """(tokens of each text, tokens a second, milliseconds for the prompt)."""
    done = subprocess.run([TRAIN, "generate", "--init", model, "--device", device, "--dtype", dtype, "--samples", str(texts),
                           "--prompt-tokens", ",".join(map(str, prompt)), "--tokens", str(tokens), "--no-prompt",
                           "--no-stop", "--show", "tokens", *more], cwd=ROOT, capture_output=True, text=True)
    speed = re.search(r"([\d.]+) tokens/s after (\d+) ms", done.stderr)
    if done.returncode or not speed:
        raise Failed(f"train_gpt generate: {done.stderr.strip()}")
    return [line.split() for line in done.stdout.splitlines()], float(speed.group(1)), int(speed.group(2))


def bench_generate(folder, wanted, device, rows):
    """Adds a row for each configuration that is wanted(name)."""
    for dtype in GENERATE_DTYPES[device]:
        for name, options, length, texts, compare in GENERATE:
            if not wanted(f"generate {name} {dtype} {device}"):
                continue
            words, model = options.split(), os.path.join(folder, f"model {options}")
            if not os.path.exists(model):
                run_measured([TRAIN, *words, "--batch", "1", "--steps", "0", "--eval-every", "0", "--device", "cpu", "--out",
                              model])
            vocab = int(words[words.index("--vocab") + 1])
            prompt = [7919 * i % vocab for i in range(length)]
            fast, speed, prompt_ms = run_generate(model, prompt, device, dtype, texts, GENERATE_TOKENS)
            row = {"what": name, "dtype": dtype, "tokens/s": speed, "ms for the prompt": prompt_ms, "measured": stamp()}
            if compare:
                slow, slow_speed, _ = run_generate(model, prompt, device, dtype, texts, GENERATE_SLOW, "--no-cache")
                # bf16 rounds a product of one row and one of many differently now and then.
                if dtype == "fp32" and slow != [text[:GENERATE_SLOW] for text in fast]:
                    raise Failed(f"generate: {fast} with the cache, {slow} without")
                row.update({"tokens/s without cache": slow_speed, "times faster": round(speed / slow_speed, 1)})
            rows.append(row)
            print_row(row)


def print_row(row):
    print("  ".join(f"{value:<36}" if key == "what" else f"{key} {value}" for key, value in row.items()), flush=True)


# --- tables -------------------------------------------------------------------------------------------------------------

def read_rows(path):
    """Rows of a CSV under dev/results; lines that begin with # are its remarks."""
    with open(path, newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def read_origin(path):
    """(date, commit, machine and software) of a CSV by its first line; empty ones of a CSV of another form."""
    with open(path) as file:
        found = re.match(r"# (\S+), commit (\S+), (.*?)(?:;|$)", file.readline())
    return found.groups() if found else ("", "", "another form")


def write_rows(path, columns, rows, words, explanation, selection):
    """Writes the CSV. A selection takes the place of its own rows in what is there, where that was measured on the same."""
    kept = []
    if selection and os.path.exists(path):
        date, of_commit, before = read_origin(path)
        if before == words:
            new = {tuple(row.get(column, "") for column in KEY_COLUMNS) for row in rows}
            kept = [{**row, "measured": row.get("measured") or f"{date} {of_commit}"} for row in read_rows(path)
                    if tuple(row.get(column) or "" for column in KEY_COLUMNS) not in new]
        else:
            print(f"{os.path.relpath(path, ROOT)} was of {before}, this is {words}: its rows are left out")
    with open(path, "w", newline="") as file:
        file.write(header(words, explanation))
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(kept + rows)
    print(f"wrote {os.path.relpath(path, ROOT)}")


def shape_title(row):
    packed = " packed" if row.get("layout") == "packed" else ""
    return f"B{row['B']} NH{row['NH']} T{row['T']} HS{row['HS']} {row['dtype']}{packed}"


def attention_table(machine, rows):
    """Forward / backward rates of every kernel, a line a shape."""
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    unit = "gflops" if machine.startswith("cpu") else "tflops"
    lines = [f"{machine}, {unit[0].upper()}FLOP/s forward / backward:", "",
             "| shape | " + " | ".join(f"`{kernel}`" for kernel in kernels) + " |", "|---|" + "---|" * len(kernels)]
    cells = {}
    for row in rows:
        if row.get("of_bound") == "nan":  # an operator of PyTorch's that gives no numbers for this type
            continue
        shape = shape_title(row)
        rates = [float(row[f"{way}_{unit}"]) for way in ("forward", "backward")]
        texts = [f"{rate:.3g}" if rate < 100 else f"{rate:.0f}" for rate in rates]
        cells.setdefault(shape, {})[row["kernel"]] = " / ".join(texts)
    for shape, found in cells.items():
        lines.append(f"| {shape} | " + " | ".join(found.get(kernel, "") for kernel in kernels) + " |")
    return lines


def deterministic_table(machine, rows):
    """Milliseconds of the deterministic backward of every kernel, a line a shape. Those of the usual backward of our kernels
    stand beside, from attention_torch.csv, where that is of the same day, commit, machine and software; else it is said of
    which commit either is."""
    usual, (own, other) = {}, (os.path.join(ROOT, "dev", "results", machine, f"{name}.csv")
                               for name in ("attention_deterministic", "attention_torch"))
    words = f"{machine}, ms of the deterministic backward, commit {read_origin(own)[1]}"
    if os.path.exists(other) and read_origin(own) == read_origin(other):
        usual = {(shape_title(row), row["kernel"]): float(row["backward_ms"]) for row in read_rows(other)}
    elif os.path.exists(other):
        words += f" (the usual one, above, is of {read_origin(other)[1]})"
    cells, columns = {}, {}
    for row in rows:
        if row.get("of_bound") == "nan":  # as in attention_table
            continue
        shape, name, ms = shape_title(row), f"`{row['kernel']}`", float(row["backward_ms"])
        found, before = cells.setdefault(shape, {}), usual.get((shape, row["kernel"]))
        found[name] = f"{ms:.3f}"
        if before and not row["kernel"].startswith("PyTorch"):
            found.update({f"{name} usually": f"{before:.3f}", f"{name} times as long": f"{ms / before:.2f}"})
        columns.update(dict.fromkeys(column for column in found if column.startswith(name)))
    lines = [f"{words}:", "", "| shape | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    return lines + [f"| {shape} | " + " | ".join(found.get(column, "") for column in columns) + " |"
                    for shape, found in cells.items()]


def trainer_table(machine, rows):
    """The columns of trainer.csv that have anything in them, but for when a row was measured."""
    columns = [column for column in rows[0] if column != "measured" and any(row[column] for row in rows)]
    lines = [f"{machine}:", "", "| " + " | ".join(columns) + " |", "|---|" + "---|" * (len(columns) - 1)]
    return lines + ["| " + " | ".join(row[column] for column in columns) + " |" for row in rows]


def profile_table(machine, rows):
    """Parts of a step and the kernels in them that take at least a hundredth of it."""
    columns = ("part", "kernel", "launches", "ms", "share", "of floor")
    lines = [f"{machine}:", "", "| " + " | ".join(columns) + " |", "|---|" + "---|" * (len(columns) - 1)]
    return lines + ["| " + " | ".join(row[column] for column in columns) + " |" for row in rows
                    if float(row["share"].rstrip("%")) >= 1]


README_TABLES = {"attention": attention_table, "attention_torch": attention_table,
                 "attention_deterministic": deterministic_table, "trainer": trainer_table, "profile": profile_table,
                 "generate": trainer_table}


def write_readme():
    """Replaces what stands between <!-- bench NAME --> and <!-- end --> by the tables of dev/results/*/NAME.csv."""
    path = os.path.join(ROOT, "README.md")
    with open(path) as file:
        text = file.read()
    for name, table in README_TABLES.items():
        lines = []
        for machine in sorted(os.listdir(os.path.join(ROOT, "dev", "results"))):
            source = os.path.join(ROOT, "dev", "results", machine, f"{name}.csv")
            if os.path.exists(source):
                lines += [*table(machine, read_rows(source)), ""]
        begin = text.index(f"<!-- bench {name} -->") + len(f"<!-- bench {name} -->\n")
        text = text[:begin] + "\n".join(lines) + text[text.index("<!-- end -->", begin):]
    with open(path, "w") as file:
        file.write(text)


def parse_options(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="BENCH_PROGRAM", help="run first, from the repository's root")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="measure the trainer there only (default: on the CPU, "
                        "and on a GPU where there is one)")
    parser.add_argument("--only", metavar="REGEX", default="", help="only configurations whose \"NAME DTYPE DEVICE\" it is "
                        f"found in, as 'B16.*bf16'; \"{PREPARE}\" is one too, \"generate NAME DTYPE DEVICE\" others")
    parser.add_argument("--attention", action="append", default=[], metavar="NAME", help="on a GPU also this kernel, beside "
                        "the one that train_gpt chooses; may be repeated")
    parser.add_argument("--no-torch", action="store_true", help="on a GPU without PyTorch beside")
    parser.add_argument("--readme", action="store_true", help="write the tables of README.md, and measure nothing")
    options = parser.parse_args(arguments)
    try:
        only = re.compile(options.only)
    except re.error as error:
        parser.error(f"--only: got '{options.only}', which is no regular expression: {error}")
    options.wanted = lambda name: bool(only.search(name))
    if options.device == "cuda" and not gpu_words():
        parser.error("--device cuda: nvidia-smi shows no GPU")
    return options


def measure(options):
    """Runs what was asked for and writes its tables."""
    for program in options.programs:
        print(f"== {os.path.basename(program)}", flush=True)
        if subprocess.run([program], cwd=ROOT).returncode:
            raise Failed(f"{program} failed")
    folder, cpu_rows, gpu_rows, found = tempfile.mkdtemp(prefix="flashgpt-bench-"), [], [], False
    selection = bool(options.only)
    try:
        if options.device != "cuda":
            print("== trainer on the CPU", flush=True)
            bench_cpu(folder, options.wanted, cpu_rows)
            if options.wanted(PREPARE):
                bench_prepare(folder, cpu_rows)
        if cpu_rows:
            write_rows(results_path(machine_name("cpu"), "trainer.csv"), CPU_COLUMNS, cpu_rows, machine_words("cpu"),
                       "milliseconds of a step, median", selection)
        if options.device != "cpu" and gpu_words():
            print("== trainer on the GPU", flush=True)
            python, version = (None, "") if options.no_torch else torch_python("cuda")
            bench_gpu(folder, options.wanted, options.attention, python, gpu_rows)
        if gpu_rows:
            write_rows(results_path(machine_name("cuda"), "trainer.csv"), GPU_COLUMNS, gpu_rows, machine_words("cuda") +
                       (f", PyTorch {version}" if version else ""),
                       f"milliseconds of a step, median of {GPU_STEPS} after {GPU_WARM}; PyTorch: flash attention (fp32: "
                       "memory-efficient), fused AdamW, vocabulary padded as ours, bf16 by autocast, no TF32", selection)
        for device, there in (("cpu", options.device != "cuda"), ("cuda", options.device != "cpu" and gpu_words())):
            rows = []
            if there:
                bench_generate(folder, options.wanted, device, rows)
            if rows:
                found = True
                write_rows(results_path(machine_name(device), "generate.csv"), GENERATE_COLUMNS, rows, machine_words(device),
                           f"random weights; {GENERATE_TOKENS} tokens a text, {GENERATE_SLOW} without the cache", selection)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not cpu_rows and not gpu_rows and not found:
        raise Failed(f"--only '{options.only}' matches no configuration here")


def main():
    options = parse_options(sys.argv[1:])
    if options.readme:
        write_readme()
        return
    try:
        measure(options)
    except Failed as failure:
        sys.exit(f"bench.py: {failure}")


if __name__ == "__main__":
    main()
