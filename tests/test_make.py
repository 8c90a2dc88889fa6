#!/usr/bin/env python3
"""The Makefile: flags of the caller are added to its own; a detection that failed is not remembered; kernels whose source is
gone do not stay."""
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
        with test("a kernel whose source is gone or was renamed does not stay; a .so that make did not build does"):
            folder = os.path.join("build", VARIANT, "attention")
            os.makedirs(os.path.join(ROOT, folder), exist_ok=True)

            def place(name, source):
                with open(os.path.join(ROOT, folder, name), "w") as file:
                    file.write("not an object\n")
                if source:
                    with open(os.path.join(ROOT, folder, name + ".d"), "w") as file:
                        file.write(f"{folder}/{name}: {source} \\\n attention/attention.h\nattention/attention.h:\n")
            place("gone.so", "dev/attention/gone.c")
            place("online.so", "dev/attention/gone.cu")
            place("own.so", None)
            status, output = make(f"CC={REAL}", "kernels", "KERNEL_TOOLS=")
            found = {name for name in os.listdir(os.path.join(ROOT, folder)) if ".so" in name}
            wanted = {"own.so", *(name + end for name in ("naive.so", "online.so") for end in ("", ".d"))}
            check(status == 0 and found >= wanted and not found & {"gone.so", "gone.so.d"}, status, found, output)
            with open(os.path.join(ROOT, folder, "online.so"), "rb") as file:
                check(file.read(4) == b"\x7fELF", "the renamed kernel was not built again:", output)
            for goal in ("kernels", "test", "test-c", "bench", "emulated"):
                place("gone.so", "dev/attention/gone.c")
                status, output = make(f"CC={REAL}", "-n", goal)
                lines = [line for line in output.splitlines() if line.startswith("rm -f") and "gone.so" in line]
                check(status == 0 and len(lines) == 1 and "own.so" not in lines[0], goal, status, lines or output[-500:])
    finally:
        shutil.rmtree(os.path.join(ROOT, "build", VARIANT), ignore_errors=True)
        FOLDER.cleanup()
    end()


if __name__ == "__main__":
    main()
