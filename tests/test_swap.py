#!/usr/bin/env python3
"""dev/swap.sh: trains with each kernel and compares; what is wrong with a kernel is said before the first run starts."""
import os
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
from check import check, end, skip, test  # noqa: E402
from trainer_runs import ROOT, TINY, TRAIN, read_log, write_corpus  # noqa: E402

BUILD = os.path.join(ROOT, os.environ.get("BUILD", "build"))
FOLDER = tempfile.TemporaryDirectory()


def swap(out, *words):
    """Exit status, output and errors of dev/swap.sh with tiny models on the CPU."""
    kernels, options = words[:words.index("--")], words[words.index("--") + 1:]
    tiny = TINY[:TINY.index("--warmup")]  # whether there is a warmup is the script's to say
    done = subprocess.run(["sh", os.path.join(ROOT, "dev", "swap.sh"), *kernels, "--", *tiny, "--device", "cpu", "--data",
                           os.path.join(FOLDER.name, "corpus"), *options], capture_output=True, text=True, cwd=FOLDER.name,
                          env={**os.environ, "TRAIN": TRAIN, "PYTHON": sys.executable, "SWAP_OUT": out})
    return done.returncode, done.stdout, done.stderr


def main():
    write_corpus(os.path.join(FOLDER.name, "corpus"))
    out = os.path.join(FOLDER.name, "a place")
    with test("two kernels, three steps, a folder with a blank in its name"):
        status, output, errors = swap(out, "tiled", "reference", "--", "--steps", "3")
        check(status == 0, status, output[-500:], errors)
        check("against tiled" in output, output[-500:])
        for name in ("tiled", "reference"):
            losses = [line["loss"] for line in read_log(os.path.join(out, name)) if "loss" in line]
            check(len(losses) == 3, f"{name} has {len(losses)} steps, expected 3")
    with test("paths are those of the directory one stands in, for kernels, data and SWAP_OUT"):
        kernel = os.path.join(BUILD, "attention", "naive.so")
        if not os.path.exists(kernel):
            skip(f"{kernel} is not built: make kernels")
        shutil.copy(kernel, os.path.join(FOLDER.name, "mine.so"))
        status, output, errors = swap("here", "tiled", "naive", "./mine.so", "--", "--data", "corpus", "--steps", "3")
        check(status == 0 and sorted(os.listdir(os.path.join(FOLDER.name, "here")))[-3:] == ["mine", "naive", "tiled"], status,
              output[-500:], errors)
    with test("without --steps there are 100, ten of them warmup"):
        out = os.path.join(FOLDER.name, "default")
        status, output, errors = swap(out, "tiled", "--", "--eval-every", "0")
        check(status == 0, status, output[-500:], errors)
        rates = [line["lr"] for line in read_log(os.path.join(out, "tiled")) if "lr" in line]
        check(len(rates) == 100 and max(rates) == rates[9], f"{len(rates)} steps, of learning rates {rates[:12]} ...")
    with test("a kernel that cannot run is named before the first run, and nothing is left"):
        out = os.path.join(FOLDER.name, "nothing")
        status, output, errors = swap(out, "tiled", "nowhere", "--", "--steps", "3")
        check(status == 2 and "nowhere" in errors, status, errors)
        check("== tiled" not in output and not os.path.exists(out), "tiled was trained with:", output[-500:])
    with test("a kernel for GPUs with a trainer that was built for the CPU only: what to do is said, nothing is left"):
        status, output, errors = swap(out, "tiled", "flash_mma", "--", "--steps", "3")
        if "runs on cuda" in errors:
            skip("this build has CUDA")
        check(status == 2 and "'flash_mma' is for GPUs" in errors and "make ARCH=sm_90a" in errors, status, errors)
        check("== tiled" not in output and not os.path.exists(out), "tiled was trained with:", output[-500:])
    with test("--out and --attention among the options are refused: they are the script's"):
        out = os.path.join(FOLDER.name, "refused")
        for option, words in (("--out", "SWAP_OUT"), ("--attention", "the kernels are the arguments")):
            for given in ([option, "tiled"], [option + "=tiled"]):
                status, output, errors = swap(out, "tiled", "--", *given)
                check(status == 2 and option in errors and words in errors and errors.count("\n") == 1, status, errors)
                check(not output and not os.path.exists(out), output)
    FOLDER.cleanup()
    end()


if __name__ == "__main__":
    main()
