#!/usr/bin/env python3
"""The Makefile: flags of the caller are added to its own; a detection that failed is not remembered."""
import os
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path.insert(0, HERE)
from check import check, end, test  # noqa: E402

FOLDER = tempfile.TemporaryDirectory()
VARIANT = f"test-make-{os.getpid()}"  # builds of its own, in build/VARIANT
OBJECT = f"build/{VARIANT}/data/error.c.o"
REAL = shutil.which(os.environ.get("CC", "cc").split()[0]) or "cc"


def make(*words):
    """Exit status and all output of make, without what a make around this test has set."""
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    done = subprocess.run(["make", "CUDA=0", f"VARIANT={VARIANT}", *words], cwd=ROOT, env=env, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def main():
    try:
        with test("flags of the caller come after those that the code needs"):
            status, output = make(f"CC={REAL}", "-n", OBJECT, "CFLAGS=-O1 -DMINE", "CPPFLAGS=-DOURS")
            lines = [line for line in output.splitlines() if "error.c" in line]
            check(status == 0 and len(lines) == 1, status, output)
            words = lines[0].split() if lines else []
            for flag in ("-std=gnu11", "-fPIC", "-pthread", "-D_GNU_SOURCE", "-DMINE", "-DOURS"):
                check(flag in words, f"{flag} is missing in: {' '.join(words)}")
            optimize = [word for word in words if word.startswith("-O")]
            check(optimize[-1:] == ["-O1"], "optimizes with", optimize)
        with test("a compiler that is installed after a failure is found"):
            late = os.path.join(FOLDER.name, "late-cc")
            for _ in range(2):
                status, output = make(f"CC={late}", "-n", OBJECT)
                check(status != 0 and "cannot build and run a program" in output and late in output, status, output)
            with open(late, "w") as file:
                file.write(f'#!/bin/sh\nexec "{REAL}" "$@"\n')
            os.chmod(late, 0o755)
            status, output = make(f"CC={late}", "-n", OBJECT)
            check(status == 0 and "error.c" in output, status, output)
    finally:
        shutil.rmtree(os.path.join(ROOT, "build", VARIANT), ignore_errors=True)
        FOLDER.cleanup()
    end()


if __name__ == "__main__":
    main()
