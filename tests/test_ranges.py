#!/usr/bin/env python3
"""The ranges that a profiler sees (layers/ranges.h): an NVTX tool made here, loaded as a profiler would be, writes down
what the trainer names. And dev/trace.sh (make trace), with a stand-in for nsys."""
import collections
import os
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from check import check, end, skip, test  # noqa: E402
from trainer_runs import ROOT, TINY, TRAIN, train, write_corpus  # noqa: E402

TMP = tempfile.mkdtemp(prefix="flashgpt-ranges-")
TOOL = r"""
#include <nvtx3/nvToolsExt.h>
#include <stdio.h>
#include <stdlib.h>

static FILE *out;
static int push(const char *name) { fprintf(out, "push %s\n", name); fflush(out); return 0; }
static int pop(void) { fprintf(out, "pop\n"); fflush(out); return 0; }

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get);
int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get)
{
    const NvtxExportTableCallbacks *callbacks = (const NvtxExportTableCallbacks *)get(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table;
    unsigned size;
    out = fopen(getenv("RANGES_OUT"), "w");
    if (!out || !callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size)) return 0;
    *table[NVTX_CBID_CORE_RangePushA] = (NvtxFunctionPointer)push;
    *table[NVTX_CBID_CORE_RangePop] = (NvtxFunctionPointer)pop;
    return 1;
}
"""


def build_tool():
    """The tool's path; skips where NVTX's header is not there, or the trainer was built without it."""
    nvcc = shutil.which(os.environ.get("NVCC", "nvcc"))
    include = nvcc and os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(nvcc))), "include")
    if not include or not os.path.exists(os.path.join(include, "nvtx3", "nvToolsExt.h")):
        skip("no nvcc with NVTX's header beside it")
    with open(TRAIN, "rb") as file:
        if b"NVTX_INJECTION64_PATH" not in file.read():
            skip(f"{TRAIN} was built without NVTX")
    source, library = os.path.join(TMP, "tool.c"), os.path.join(TMP, "tool.so")
    with open(source, "w") as file:
        file.write(TOOL)
    command = [*os.environ.get("CC", "cc").split(), "-shared", "-fPIC", "-isystem", include, source, "-o", library]
    subprocess.run(command, check=True)
    return library


def seen_ranges(*options):
    """What the tool wrote down of a run: paths of nested names, in the order in which they began."""
    out = os.path.join(TMP, "ranges")
    status, _, err = train(*options, env={"NVTX_INJECTION64_PATH": build_tool(), "RANGES_OUT": out})
    check(status == 0, err)
    paths, stack = [], []
    with open(out) as file:
        for line in file:
            words = line.split(maxsplit=1)
            if words[0] == "push":
                stack.append(words[1].strip())
                paths.append("/".join(stack))
            else:
                check(stack, "a range ends that never began")
                stack[-1:] = []
    check(not stack, "ranges that never end:", stack)
    return paths


def test_ranges():
    with test("every update, evaluation, sample, checkpoint and page is a range, nested as they are"):
        data, run = write_corpus(os.path.join(TMP, "data")), os.path.join(TMP, "run")
        paths = seen_ranges(*TINY, "--data", data, "--steps", 6, "--eval-every", 3, "--save-every", 3, "--sample-every", 4,
                            "--sample-tokens", 2, "--print-every", 1, "--device", "cpu", "--out", run)
        counts = collections.Counter(path for path in paths if " " not in path.replace("first update", ""))
        wanted = {"first update": 1, "first update/launch": 1, "first update/wait": 1, "first update/prefetch": 2,
                  "update": 5, "update/launch": 5, "update/wait": 5, "update/prefetch": 4, "evaluate": 3, "save": 2,
                  "sample": 2, "report": 4}
        check(counts == wanted, dict(counts), "expected", wanted)
        order = ("evaluate", "first update", "first update/launch", "update", "update/launch")
        check(sorted(order, key=paths.index) == list(order), paths)
        layer = ["qkv forward", "attention forward", "proj forward", "fc forward", "fcproj forward"]
        back = [f"{what} backward {way}" for what in ("fcproj", "fc", "proj", "qkv") for way in ("weight", "input")]
        back.insert(6, "attention backward")
        head = ["head forward", "head backward input", "head backward weight"]
        found = [path.split("/")[2] for path in paths if path.startswith("update/launch/")]
        check(found == (2 * layer + head + 2 * back) * 5, "products and attention of a step:", found)


FAKE = """#!/bin/sh
echo "$1" >> "$FAKE_LOG"
[ "$1" = stats ] && { echo "ranges of $5"; exit 0; }
while [ "${1#-}" != "$1" ] || [ "$1" = profile ]; do
    [ "$1" = --output ] && { echo > "$2.nsys-rep"; shift; }
    shift
done
exec "$@"
"""


def trace(*options, path=""):
    command = ["/bin/sh", os.path.join(ROOT, "dev", "trace.sh"), TRAIN, os.path.join(TMP, "trace"), *map(str, options)]
    environment = {**os.environ, "PATH": path + os.environ["PATH"], "FAKE_LOG": os.path.join(TMP, "fake_log"),
                   "PYTHON": sys.executable}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_trace():
    small = [*TINY, "--model", "d1", "--vocab", 0, "--steps", 4, "--eval-every", 2, "--device", "cpu", "--dtype", "fp32"]
    with test("dev/trace.sh: the trainer runs under nsys with the options that are given, then nsys sums its ranges up"):
        os.mkdir(os.path.join(TMP, "bin"))
        fake = os.path.join(TMP, "bin", "nsys")
        with open(fake, "w") as file:
            file.write(FAKE)
        os.chmod(fake, 0o755)
        done = trace(*small, path=os.path.join(TMP, "bin") + ":")
        check(done.returncode == 0 and "done at step 4 of 4" in done.stdout, done.stdout, done.stderr)
        check(os.path.exists(os.path.join(TMP, "trace.nsys-rep")), "no output")
        with open(os.path.join(TMP, "fake_log")) as file:
            check(file.read().split() == ["profile", "stats"], "nsys was called otherwise")
        check("ranges of " + os.path.join(TMP, "trace.nsys-rep") in done.stdout, done.stdout)
        done = trace(*small, "--lr", "many", path=os.path.join(TMP, "bin") + ":")
        check(done.returncode == 1 and "--lr" in done.stderr, "a failed run passes:", done.returncode, done.stderr)
    with test("dev/trace.sh: without nsys, one sentence"):
        if shutil.which("nsys"):
            skip("nsys is installed")
        done = trace(*small)
        check(done.returncode == 2 and "needs nsys" in done.stderr and done.stderr.count("\n") == 1, done.stderr)


def main():
    try:
        test_ranges()
        test_trace()
    finally:
        shutil.rmtree(TMP, ignore_errors=True)
    end()


if __name__ == "__main__":
    main()
