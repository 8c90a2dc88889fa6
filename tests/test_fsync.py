#!/usr/bin/env python3
"""A checkpoint gets its name only when it is on the disk: each file is fsynced whole, then its directory, then comes the
rename, then the fsync of the run's directory. A library that is loaded before the C library writes these calls down."""
import os
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from check import check, end, skip, test  # noqa: E402
from trainer_runs import TINY, train, write_corpus  # noqa: E402

TMP = os.path.realpath(tempfile.mkdtemp(prefix="flashgpt-fsync-"))
SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void note(const char *what, const char *a, const char *b, long long size)
{
    char line[9000];
    int log = open(getenv("CALLS_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0666);
    int length = snprintf(line, sizeof line, "%s\t%s\t%s\t%lld\n", what, a, b, size);
    if (log < 0 || write(log, line, (size_t)length) != length) abort();
    close(log);
}

static int synced(const char *name, int file)
{
    char link[64], path[4096] = "";
    struct stat status = {0};
    int (*original)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    int result = original(file);
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (!result && readlink(link, path, sizeof path - 1) > 0 && !fstat(file, &status))
        note("fsync", path, "", (long long)status.st_size);
    return result;
}

int fsync(int file) { return synced("fsync", file); }
int fdatasync(int file) { return synced("fdatasync", file); }

int rename(const char *from, const char *to)
{
    int (*original)(const char *, const char *) = (int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename");
    int result = original(from, to);
    if (!result) note("rename", from, to, 0);
    return result;
}
"""


def build_library():
    """The path of the library, or None with a reason where it cannot be built."""
    source, library = os.path.join(TMP, "calls.c"), os.path.join(TMP, "calls.so")
    with open(source, "w") as file:
        file.write(SOURCE)
    command = [*os.environ.get("CC", "cc").split(), "-shared", "-fPIC", "-O1", source, "-o", library, "-ldl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return None, str(error)
    return (library, "") if done.returncode == 0 else (None, (done.stderr.strip().splitlines() or ["no reason given"])[-1])


def logged_run(library, run, *options):
    """Trains; returns the calls as (what, path, other path, size), paths made absolute."""
    log = os.path.join(TMP, "calls")
    status, _, err = train(*options, "--out", run, env={"LD_PRELOAD": library, "CALLS_LOG": log,
                                                        "ASAN_OPTIONS": "verify_asan_link_order=0"})
    check(status == 0, err)
    with open(log) as file:
        return [tuple(line.rstrip("\n").split("\t")) for line in file]


def place(calls, what, path):
    """The last place of a call on a path, or -1."""
    return max((i for i, call in enumerate(calls) if call[:2] == (what, path)), default=-1)


def check_checkpoint(calls, at, run):
    """The rename at that place gave a checkpoint its name: what came before it, and after."""
    temporary, final = calls[at][1:3]
    directory = place(calls[:at], "fsync", temporary)
    check(directory >= 0, f"{temporary} is renamed, and was not fsynced")
    names = sorted(os.listdir(final))
    check({"config.json", "model.safetensors", "optimizer.safetensors", "state.json"} <= set(names), names)
    for name in names:
        synced = place(calls[:at], "fsync", os.path.join(temporary, name))
        if check(0 <= synced < directory, f"{name} is fsynced at {synced}, its directory at {directory}"):
            size = os.path.getsize(os.path.join(final, name))
            check(int(calls[synced][3]) == size, f"{name} had {calls[synced][3]} bytes when it was fsynced, now {size}")
    after = [i for i, call in enumerate(calls) if i > at and call[:2] == ("fsync", run)]
    following = [i for i, call in enumerate(calls) if i > at and call[0] == "rename"]
    check(after and (not following or after[0] < following[0]), f"{run} is not fsynced after the rename of {temporary}")


def main():
    library, reason = build_library()
    with test("each file of a checkpoint, its directory, the rename, the run's directory: synced in this order"):
        if not library:
            skip("the library that writes calls down cannot be built: " + reason)
        run = os.path.join(TMP, "run")
        calls = logged_run(library, run, *TINY, "--data", write_corpus(os.path.join(TMP, "corpus")), "--steps", 3,
                           "--save-every", 1, "--keep", 0, "--eval-every", 0, "--device", "cpu")
        renames = [i for i, call in enumerate(calls) if call[0] == "rename" and re.search(r"/step_\d+$", call[2])]
        check(len(renames) == 3, f"{len(renames)} checkpoints were renamed, expected 3; calls: {calls}")
        for at in renames:
            check_checkpoint(calls, at, run)
    shutil.rmtree(TMP)
    end()


if __name__ == "__main__":
    main()
