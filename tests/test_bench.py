#!/usr/bin/env python3
"""dev/bench_attention: a selection leaves the tracked results alone. dev/bench.py explains itself, and its tables fit the
README's."""
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:0] = [HERE, os.path.join(ROOT, "dev")]
from check import check, end, skip, test  # noqa: E402
import bench  # noqa: E402

PROGRAM = os.path.join(ROOT, os.environ.get("BUILD", "build"), "dev", "bench_attention")
FOLDER = tempfile.TemporaryDirectory()


def run(*options):
    """Exit status, output and errors of bench_attention, in a folder of its own, as quick as it goes."""
    done = subprocess.run([PROGRAM, "--device", "cpu", "--shape", "1,1,16,16", "--repeats", "1", *options], cwd=FOLDER.name,
                          capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def files():
    return sorted(name for _, _, names in os.walk(FOLDER.name) for name in names)


def main():
    os.makedirs(os.path.join(FOLDER.name, "dev", "results"))
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
    with test("bench.py: --help is its docstring, an unknown option an error"):
        for option, status, words in (("--help", 0, "--readme"), ("--colour", 2, "--colour")):
            done = subprocess.run([sys.executable, bench.__file__, option], capture_output=True, text=True)
            check(done.returncode == status and words in done.stdout + done.stderr, option, done.returncode, done.stderr)
    with test("bench.py: rates of a CPU and of a GPU become a table"):
        row = {"kernel": "k", "B": "1", "NH": "2", "T": "3", "HS": "4", "dtype": "fp32"}
        for machine, unit, label in (("cpu-x", "gflops", "GFLOP/s"), ("nvidia-x", "tflops", "TFLOP/s")):
            lines = bench.attention_table(machine, [{**row, f"forward_{unit}": "12.34", f"backward_{unit}": "345.6"}])
            check(label in lines[0] and lines[-1] == "| B1 NH2 T3 HS4 fp32 | 12.3 / 346 |", lines)
    FOLDER.cleanup()
    end()


if __name__ == "__main__":
    main()
