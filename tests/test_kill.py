#!/usr/bin/env python3
"""SIGKILL at random instants of a run that saves every step: whatever it interrupts, what is called step_* is complete,
--resume goes on from the newest, and the run ends with the losses and weights of one that was never killed.

FLASHGPT_KILLS is the number of kills, 10 by default; FLASHGPT_SEED that of the instants."""
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from check import check, end, test  # noqa: E402
from trainer_runs import ROOT, TINY, TRAIN, checkpoint_bytes, log_values, train, write_corpus  # noqa: E402

KILLS = int(os.environ.get("FLASHGPT_KILLS", "10"))
SEED = int(os.environ.get("FLASHGPT_SEED", "1"))
STEPS = 60
KEEP = 2
os.environ["OMP_NUM_THREADS"] = "1"  # so small a model is faster so, and runs can be compared
TMP = tempfile.mkdtemp(prefix="flashgpt-kill-")
OPTIONS = [*TINY, "--steps", STEPS, "--save-every", 1, "--keep", KEEP, "--eval-every", 7, "--eval-tokens", 300,
           "--print-every", 0, "--lr", "3e-3", "--data", os.path.join(TMP, "corpus")]


def fault_of(path):
    """What a checkpoint lacks, seen with other eyes than the trainer's; None for a complete one."""
    step = int(os.path.basename(path)[5:])
    try:
        with open(os.path.join(path, "state.json")) as file:
            state = json.load(file)
        with open(os.path.join(path, "config.json")) as file:
            json.load(file)
        if state["step"] != step:
            return f"state.json says step {state['step']}"
        sizes = [os.path.getsize(os.path.join(folder, "tokenizer.bin")) for folder in (path, os.path.join(TMP, "corpus"))]
        if sizes[0] != sizes[1]:
            return "tokenizer.bin is cut short"
        for name in ("model.safetensors", "optimizer.safetensors"):
            with open(os.path.join(path, name), "rb") as file:
                length, = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(length))
                ends = [value["data_offsets"][1] for key, value in header.items() if key != "__metadata__"]
                if file.seek(0, os.SEEK_END) != 8 + length + max(ends):
                    return f"{name} is cut short"
    except (OSError, ValueError, KeyError, struct.error) as error:
        return f"{type(error).__name__}: {error}"
    return None


def look(folder):
    """The highest step saved (or -1) and the number of checkpoints. Checks that every step_* is complete."""
    names = [name for name in os.listdir(folder) if name.startswith("step_")] if os.path.isdir(folder) else []
    for name in names:
        fault = fault_of(os.path.join(folder, name))
        check(fault is None, f"{name} is not complete: {fault}")
    return max((int(name[5:]) for name in names), default=-1), len(names)


def live(folder, seconds):
    """Starts the trainer and kills it after so long. Returns its exit status (None: it was killed), stdout and stderr."""
    begun = os.path.exists(os.path.join(folder, ".lock"))  # what a run writes first
    command = [TRAIN, *map(str, OPTIONS), "--out", folder, *(["--resume"] if begun else [])]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        out, err = process.communicate()
    return (None if process.returncode == -signal.SIGKILL else process.returncode), out, err


def killed_run(name, generator, longest, wanted):
    """One run that is killed up to `wanted` times before it may end. Returns its directory, the number of kills, and
    the step from which its last life went on."""
    folder = os.path.join(TMP, name)
    kills, newest, count, status = 0, -1, 0, None
    while status is None:
        before, most = newest, max(KEEP, count) + 1  # a life may be killed between one save and its pruning
        status, out, err = live(folder, generator.uniform(0, longest) if kills < wanted else None)
        kills += status is None
        if not check(status in (None, 0), f"after {kills} kills it ended with {status}: {err}"):
            break
        newest, count = look(folder)
        check(count <= most, f"{count} checkpoints are kept, at most {most} were expected")
        check(newest >= before, f"step {before} was complete, after the kill the newest is {newest}")
        resumed = re.search(r"resuming from \S*step_(\d+)", out)
        if resumed:
            check(int(resumed.group(1)) == before, f"resumed from {resumed.group(1)}, the newest was {before}")
        elif status == 0:
            check(before == -1, f"step {before} was complete, and it started anew")
    return folder, kills, before


def main():
    write_corpus(os.path.join(TMP, "corpus"), sizes=(641, 321, 449))
    whole = os.path.join(TMP, "whole")
    with test("a run that is not killed"):
        began = time.time()
        status, _, err = train(*OPTIONS, "--out", whole)
        check(status == 0, err)
        check(look(whole) == (STEPS, KEEP), f"the newest step and the number of checkpoints are {look(whole)}")
        a_run = time.time() - began
        check(train(*TINY, "--steps", 0, "--data", os.path.join(TMP, "corpus"))[0] == 0, "a run of no steps failed")
        a_start = time.time() - began - a_run
    longest = a_start + 8 * (a_run - a_start) / STEPS  # a life then ends within its first eight steps, or while it starts
    generator, done, runs = random.Random(SEED), 0, 0
    while done < KILLS and runs < KILLS:
        runs += 1
        with test(f"run {runs}, killed at random instants, ends as the one that was not killed"):
            folder, kills, start = killed_run(f"run_{runs}", generator, longest, min(KILLS - done, 25))
            done += kills
            check(log_values(folder) == log_values(whole), "losses differ")
            last = f"step_{STEPS:08d}"
            check(checkpoint_bytes(os.path.join(folder, last)) == checkpoint_bytes(os.path.join(whole, last)),
                  "weights or moments differ")
            left = [name for name in os.listdir(folder) if name.startswith(".tmp.")]
            check(start == STEPS or (not left and look(folder)[1] == KEEP),
                  f"the last life saved, and left {look(folder)[1]} checkpoints and {left}")
            shutil.rmtree(folder)
    with test(f"{KILLS} kills were made"):
        check(done == KILLS, f"{done} in {runs} runs")
    shutil.rmtree(TMP)
    end()


if __name__ == "__main__":
    main()
