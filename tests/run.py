#!/usr/bin/env python3
"""Runs test programs and scripts one after another and adds up their closing lines.

    python3 tests/run.py [--gpu-report FILE] PROGRAM|SCRIPT.py ...

Each prints lines "ok NAME", "FAIL NAME", "skip NAME: REASON" and closes with "N passed, N failed, N skipped". One that ends
without that line, or with a status that does not fit it, counts as one failure. Prints the sum as the last line; exits 1
where anything failed. FLASHGPT_TESTS=WORD runs those with WORD in their name only.

With --gpu-report, where a GPU is visible and all tests run, FILE gets what they printed, below what they ran on. The commit
is that of the tree; FLASHGPT_COMMIT names it where there is no git.
"""
import datetime
import os
import re
import subprocess
import sys
import time

CLOSING = re.compile(r"^(\d+) passed, (\d+) failed(?:, (\d+) skipped)?$")


class Output:
    """What is printed, shown and kept."""

    def __init__(self):
        self.lines = []

    def print(self, line):
        self.lines.append(line)
        print(line, flush=True)


def first_line(*command):
    """The first line of a command's output; "unknown" where it gives none."""
    try:
        lines = subprocess.run(command, capture_output=True, text=True).stdout.strip().splitlines()
    except OSError:
        lines = []
    return lines[0].strip() if lines else "unknown"


def describe_gpu():
    """What a report says of the machine, as (name, value) pairs; none where no GPU is visible."""
    gpu = first_line("nvidia-smi", "--query-gpu=name,driver_version,compute_cap,memory.total", "--format=csv,noheader")
    if gpu.count(",") != 3:
        return []
    name, driver, capability, memory = (word.strip() for word in gpu.split(","))
    return [("date", datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")),
            ("commit", os.environ.get("FLASHGPT_COMMIT") or first_line("git", "rev-parse", "HEAD")),
            ("GPU", f"{name}, {memory}, compute capability {capability}"), ("driver", driver),
            ("CUDA toolkit", first_line("sh", "-c", "nvcc --version | grep -o 'release.*'"))]


def write_report(path, lines):
    """The report of a run on a GPU."""
    machine = describe_gpu()
    if not machine:
        return
    with open(path, "w") as file:
        for name, value in machine:
            file.write(f"{name}: {value}\n")
        file.write("\n" + "\n".join(lines) + "\n")
    print(f"wrote {path}")


def run_one(path, output):
    """Runs one test, shows its output; returns (passed, failed, skipped)."""
    command = [sys.executable, path] if path.endswith(".py") else [path]
    start = time.time()
    # Idle OpenMP threads sleep soon, as the trainer's do (layers/cpu.h): tests share the machine with what they start.
    environment = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0", **os.environ}
    output.print(f"== {os.path.basename(path)}")
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                                   env=environment)
    except OSError as error:
        output.print(f"FAIL {path}: cannot be run: {error.strerror}")
        return 0, 1, 0
    last = ""
    for line in process.stdout:
        if CLOSING.match(line.strip()):
            last = line.strip()
            continue
        output.print(line.rstrip("\n"))
    status = process.wait()
    match = CLOSING.match(last)
    if not match:
        output.print(f"FAIL {path}: ended with status {status} and without its closing count")
        return 0, 1, 0
    passed, failed, skipped = (int(group or 0) for group in match.groups())
    if (status == 0) != (failed == 0):
        output.print(f"FAIL {path}: status {status} does not fit '{last}'")
        failed += 1
    output.print(f"   {passed} passed, {failed} failed, {skipped} skipped in {time.time() - start:.1f} s")
    return passed, failed, skipped


def main():
    word, paths, report = os.environ.get("FLASHGPT_TESTS", ""), sys.argv[1:], None
    if paths[:1] == ["--gpu-report"]:
        report, paths = paths[1], paths[2:]
    output, totals = Output(), [0, 0, 0]
    for path in paths:
        if word in os.path.basename(path):
            totals = [a + b for a, b in zip(totals, run_one(path, output))]
    closing = "{} passed, {} failed, {} skipped".format(*totals)
    if report and not word:
        write_report(report, output.lines + ["", closing])
    print(closing)
    return 1 if totals[1] or not totals[0] else 0


if __name__ == "__main__":
    sys.exit(main())
