#!/usr/bin/env python3
"""A disk that fills up while a checkpoint is written: exit 1 and a sentence that says so, the checkpoints before it whole,
no temporary left; once there is room, --resume ends with the losses and weights of an undisturbed run.

Shown twice: with a limit on the size of a file (anyone may set one) and on a small tmpfs (where mounting is permitted)."""
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from check import check, end, skip, test  # noqa: E402
from trainer_runs import ROOT, TINY, TRAIN, checkpoint_bytes, log_values, train, write_corpus  # noqa: E402

TMP = tempfile.mkdtemp(prefix="flashgpt-disk-")
STEPS = 20
OPTIONS = [*TINY, "--steps", STEPS, "--save-every", 5, "--keep", 0, "--eval-every", 0, "--print-every", 0, "--lr", "3e-3",
           "--data", os.path.join(TMP, "corpus")]


def size_of(folder):
    """Bytes of the files below a folder."""
    return sum(os.path.getsize(os.path.join(path, name)) for path, _, names in os.walk(folder) for name in names)


def limited(largest, *options):
    """The trainer with files limited to so many bytes; returns (status, stderr)."""
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    done = subprocess.run([TRAIN, *map(str, options)], cwd=ROOT, capture_output=True, text=True, preexec_fn=limit,
                          restore_signals=False)
    return done.returncode, done.stderr


def check_same(a, b, name):
    """Two runs have the same weights and moments in the checkpoint of that name."""
    equal = checkpoint_bytes(os.path.join(a, name)) == checkpoint_bytes(os.path.join(b, name))
    check(equal, f"{name}: weights or moments differ")


def check_failure(folder, status, err, cause, good, whole):
    """It failed with one sentence that names the file and the cause, and left the good steps alone, nothing else."""
    check(status == 1, f"exit status {status}, 1 is expected: {err}")
    lines = err.strip().split("\n")
    check(len(lines) == 1 and cause in err and folder in err, f"expected one sentence of {folder} and '{cause}', got: {err}")
    names = sorted(name for name in os.listdir(folder) if name.startswith(("step_", ".tmp.")))
    check(names == [f"step_{step:08d}" for step in good], f"left: {names}")
    for name in names:
        check_same(folder, whole, name)


def check_resumed(folder, whole):
    """With room again the run ends as the undisturbed one."""
    status, _, err = train("--out", folder, "--resume")
    check(status == 0, err)
    check(log_values(folder) == log_values(whole), "losses differ")
    check_same(folder, whole, f"step_{STEPS:08d}")


def on_small_disk(whole, room):
    """The whole scenario on a tmpfs that holds two checkpoints and a part of the third."""
    disk = os.path.join(TMP, "disk")
    os.mkdir(disk)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", disk], capture_output=True, text=True)
    if made.returncode:
        skip("mounting a tmpfs is not permitted here: " + made.stderr.strip())
    try:
        folder = os.path.join(disk, "run")
        status, _, err = train(*OPTIONS, "--out", folder)
        check_failure(folder, status, err, "No space left on device", (5, 10), whole)
        check(not subprocess.run(["mount", "-o", f"remount,size={4 * room}", disk]).returncode, "cannot enlarge the disk")
        check_resumed(folder, whole)
    finally:
        subprocess.run(["umount", disk], check=True)


def main():
    write_corpus(os.path.join(TMP, "corpus"))
    whole = os.path.join(TMP, "whole")
    with test("a run with room"):
        status, _, err = train(*OPTIONS, "--out", whole)
        check(status == 0, err)
    first = os.path.join(whole, "step_00000005")
    limits = {"a byte of model.safetensors": os.path.getsize(os.path.join(first, "model.safetensors")) - 1,
              "half of optimizer.safetensors": os.path.getsize(os.path.join(first, "optimizer.safetensors")) // 2 + 5000}
    for lacking, largest in limits.items():
        with test(f"no room for {lacking}: an error, the last good checkpoint whole, and the run goes on from it"):
            folder = os.path.join(TMP, lacking.replace(" ", "_"))
            status, _, err = train(*OPTIONS, "--out", folder, "--stop", 5)
            check(status == 0, err)
            status, err = limited(largest, "--out", folder, "--resume", "--stop", 0)
            check_failure(folder, status, err, "File too large", (5,), whole)
            check_resumed(folder, whole)
    with test("a tmpfs that fills up within the third checkpoint"):
        on_small_disk(whole, size_of(first) * 5 // 2)
    shutil.rmtree(TMP)
    end()


if __name__ == "__main__":
    main()
