#!/usr/bin/env python3
"""Runs test programs and scripts one after another and adds up their closing lines.

    python3 tests/run.py PROGRAM|SCRIPT.py ...

Each prints lines "ok NAME", "FAIL NAME", "skip NAME: REASON" and closes with "N passed, N failed, N skipped". One that ends
without that line, or with a status that does not fit it, counts as one failure. Prints the sum as the last line; exits 1 where
anything failed. FLASHGPT_TESTS=WORD runs those with WORD in their name only.
"""
import os
import re
import subprocess
import sys
import time

CLOSING = re.compile(r"^(\d+) passed, (\d+) failed(?:, (\d+) skipped)?$")


def run_one(path):
    """Runs one test, shows its output; returns (passed, failed, skipped)."""
    command = [sys.executable, path] if path.endswith(".py") else [path]
    start = time.time()
    # Idle OpenMP threads sleep soon, as the trainer's do (layers/cpu.h): tests share the machine with what they start.
    environment = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0", **os.environ}
    print(f"== {os.path.basename(path)}", flush=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                               env=environment)
    last = ""
    for line in process.stdout:
        if CLOSING.match(line.strip()):
            last = line.strip()
            continue
        sys.stdout.write(line)
        sys.stdout.flush()
    status = process.wait()
    match = CLOSING.match(last)
    if not match:
        print(f"FAIL {path}: ended with status {status} and without its closing count")
        return 0, 1, 0
    passed, failed, skipped = (int(group or 0) for group in match.groups())
    if (status == 0) != (failed == 0):
        print(f"FAIL {path}: status {status} does not fit '{last}'")
        failed += 1
    print(f"   {passed} passed, {failed} failed, {skipped} skipped in {time.time() - start:.1f} s", flush=True)
    return passed, failed, skipped


def main():
    word = os.environ.get("FLASHGPT_TESTS", "")
    totals = [0, 0, 0]
    for path in sys.argv[1:]:
        if word in os.path.basename(path):
            totals = [a + b for a, b in zip(totals, run_one(path))]
    print("{} passed, {} failed, {} skipped".format(*totals))
    return 1 if totals[1] or not totals[0] else 0


if __name__ == "__main__":
    sys.exit(main())
