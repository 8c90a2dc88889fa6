#!/usr/bin/env python3
"""Runs that are stopped and go on: every loss and every weight equal those of the unbroken run, bit for bit. So do two runs
of one seed, and runs that differ in what must not matter."""
import glob
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "dev"))
from check import check, end, skip, test  # noqa: E402
from hellaswag import pack_example, pack_file  # noqa: E402
from trainer_runs import (ROOT, TINY, TRAIN, checkpoint_bytes, hear_signals, log_values, read_log, train,  # noqa: E402
                          write_corpus)

TMP = tempfile.mkdtemp(prefix="flashgpt-resume-")
COMMON = [*TINY, "--eval-every", "20", "--eval-tokens", "300", "--print-every", "0", "--save-every", "25", "--keep", "0",
          "--lr", "3e-3"]


def run(name, *options):
    """A run into TMP/name that must succeed; returns its directory."""
    folder = os.path.join(TMP, name)
    status, out, err = train(*options, "--out", folder)
    check(status == 0, f"{name}: status {status}:", err, out)
    return folder


def same(a, b, step):
    """Two runs agree in every loss and in the weights and moments after `step`."""
    values_a, values_b = log_values(a), log_values(b)
    for got, expected in zip(values_b, values_a):
        if not check(got == expected, f"got {got}, expected {expected}"):
            break
    check(len(values_a) == len(values_b), len(values_a), len(values_b))
    check(checkpoint_bytes(os.path.join(a, f"step_{step:08d}")) == checkpoint_bytes(os.path.join(b, f"step_{step:08d}")),
          "weights or moments differ")


def main():
    unequal = write_corpus(os.path.join(TMP, "unequal"), sizes=(641, 321, 449))
    whole = None
    with test("two runs of the same seed are equal bit for bit"):
        whole = run("whole", *COMMON, "--data", unequal, "--steps", 100)
        same(whole, run("again", *COMMON, "--data", unequal, "--steps", 100), 100)
    with test("another seed is another run"):
        other = run("seed", *COMMON, "--data", unequal, "--steps", 100, "--seed", 7)
        check(log_values(whole) != log_values(other), "losses are equal")
    with test("stopped at step 50 and resumed equals the unbroken run, over unequal shards and epochs"):
        folder = run("halves", *COMMON, "--data", unequal, "--steps", 100, "--stop", 50)
        check(not os.path.exists(folder + "/step_00000075"), "it did not stop")
        status, _, err = train("--out", folder, "--resume")
        check(status == 0, err)
        same(whole, folder, 100)
    with test("stopped three times, at steps that no save or evaluation falls on"):
        folder = run("pieces", *COMMON, "--data", unequal, "--steps", 100, "--stop", 13)
        for stop in (31, 87, 0):
            status, _, err = train("--out", folder, "--resume", "--stop", stop)
            check(status == 0, err)
        same(whole, folder, 100)
    with test("gradient accumulation resumes in the middle of an epoch as well"):
        options = [*COMMON, "--data", unequal, "--steps", 30, "--batch-tokens", 192]
        a = run("accumulated", *options)
        b = run("accumulated-halves", *options, "--stop", 11)
        check(train("--out", b, "--resume")[0] == 0, "resume failed")
        same(a, b, 30)
    with test("lines and checkpoints of a lost future are dropped from the log, a torn last line too"):
        folder = run("torn", *COMMON, "--data", unequal, "--steps", 100, "--stop", 50)
        with open(folder + "/log.jsonl", "a") as log:
            log.write('{"step": 51, "loss": 1.5}\n{"step": 52, "lo')
        check(train("--out", folder, "--resume")[0] == 0, "resume failed")
        same(whole, folder, 100)
    with test("Ctrl-C finishes the step, saves, says how to resume, and the run goes on to the same end"):
        folder = os.path.join(TMP, "interrupted")
        process = subprocess.Popen([TRAIN, *COMMON, "--data", unequal, "--steps", "100", "--print-every", "1",
                                    "--out", folder], preexec_fn=hear_signals,
                                   cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while "step     30/" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        check(process.returncode == 130, process.returncode, err)
        check("stopped at step" in out and shlex.split(out.splitlines()[-1]) ==
              ["go", "on", "with:", TRAIN, "--out", folder, "--resume"], out)
        last = max(line["step"] for line in read_log(folder))
        check(os.path.isdir(folder + f"/step_{last:08d}"), last, os.listdir(folder))
        check(train("--out", folder, "--resume")[0] == 0, "resume failed")
        same(whole, folder, 100)
    with test("how to resume is said as the program was started, whatever its name and the run's"):
        name, program = "the run's $HOME", os.path.join("it's here", "my gpt")
        os.mkdir(os.path.join(TMP, "it's here"))
        os.symlink(TRAIN, os.path.join(TMP, program))
        for started in ("./" + program, os.path.join(TMP, program)):
            done = subprocess.run([started, *COMMON, "--data", unequal, "--steps", "2", "--stop", "1", "--out", name], cwd=TMP,
                                  capture_output=True, text=True)
            line = done.stdout.splitlines()[-1]
            check(shlex.split(line) == ["go", "on", "with:", started, "--out", name, "--resume"], line, done.stderr)
            done = subprocess.run(["sh", "-c", line.split(": ", 1)[1]], cwd=TMP, capture_output=True, text=True)
            check(done.returncode == 0 and "done at step 2" in done.stdout, done.stdout, done.stderr)
            shutil.rmtree(os.path.join(TMP, name))
    with test("a resume that is refused, or finds damage, leaves every checkpoint and config.json as they were"):
        folder = run("guarded", *COMMON, "--data", unequal, "--steps", 100, "--stop", 75)
        before = sorted(os.listdir(folder)), open(folder + "/config.json").read()
        for options in (["--data", TMP + "/nonexistent"], ["--attention", "nope"], ["--dim", 32], ["--steps", 20]):
            status, out, err = train("--out", folder, "--resume", "--keep", 1, "--lr", 5, *options)
            check(status != 0, options, out)
        path = folder + "/step_00000075/model.safetensors"
        data = bytearray(open(path, "rb").read())
        data[-400:] = b"\xff" * 400
        open(path, "wb").write(data)
        status, out, err = train("--out", folder, "--resume", "--keep", 1)
        check(status == 1 and "nan" in err, status, err)
        check((sorted(os.listdir(folder)), open(folder + "/config.json").read()) == before, os.listdir(folder))
    with test("a run whose training data changed is not resumed"):
        moved = write_corpus(os.path.join(TMP, "moved"), sizes=(641, 321, 449))
        folder = run("moving", *COMMON, "--data", moved, "--steps", 40, "--stop", 10)
        write_corpus(moved, sizes=(641, 321, 449), seed=4)
        status, out, err = train("--out", folder, "--resume")
        check(status == 1 and "not those" in err, status, err)
        write_corpus(moved, sizes=(641, 321, 449))
        check(train("--out", folder, "--resume")[0] == 0, "the same data again is refused")
    with test("a run that was given relative paths is resumed from another directory, which has other data under them"):
        here, there = (os.path.join(os.path.realpath(TMP), name) for name in ("here *[a]? b\\c", "there"))
        write_corpus(os.path.join(here, "x"), sizes=(641, 321, 449))
        write_corpus(os.path.join(there, "x"), sizes=(641, 321, 449), seed=4)
        kernel = os.path.join(ROOT, os.environ.get("BUILD", "build"), "attention", "naive.so")
        outside = os.path.exists(kernel)
        if outside:
            shutil.copy(kernel, here)
        with open(os.path.join(here, "q.bin"), "wb") as file:
            file.write(pack_file([pack_example(0, [5, 10], [[11, 12], [7]], 1)]))
        patterns = ["--train", "x/train_?.bin", "--val", "x/v*.bin"]
        for name, data in (("data", ["--data", "x"]), ("patterns", patterns)):
            options = [*COMMON, *data, "--steps", 30, "--hellaswag", "q.bin", "--hellaswag-every", 10, "--device", "cpu",
                       *(["--attention", "naive.so"] if outside else [])]
            status, _, err = train(*options, "--out", f"whole {name}", cwd=here)
            check(status == 0, err)
            status, _, err = train(*options, "--stop", 11, "--out", name, cwd=here)
            check(status == 0, err)
            folder = os.path.join(here, name)
            status, out, err = train("--out", os.path.join("..", os.path.basename(here), name), "--resume", cwd=there)
            check(status == 0 and (not outside or "attention naive" in out), err, out)
            same(os.path.join(here, f"whole {name}"), folder, 30)
            with open(folder + "/config.json") as file:
                kept = json.load(file)
            if name == "patterns":  # dev/reference.py finds them by such a pattern
                check(glob.glob(kept["train"]) == glob.glob(glob.escape(here) + "/x/train_?.bin") != [], kept)
            else:  # other data, named anew, are those of this directory
                status, _, err = train("--out", folder, "--resume", "--steps", 40, "--data", "x", cwd=there)
                check(status == 1 and "not those" in err, status, err)
    with test("a run whose files were moved says which path is not there, and goes on with the option that it names"):
        old, new = (os.path.join(os.path.realpath(TMP), name) for name in ("old", "new"))
        write_corpus(os.path.join(old, "x"))
        with open(os.path.join(old, "q.bin"), "wb") as file:
            file.write(pack_file([pack_example(0, [5, 10], [[11, 12], [7]], 1)]))
        patterns = {"train": "x/train_*.bin", "val": "x/val_*.bin"}
        cases = [("data", "does not exist: give --data DIR", {"data": "x"}),
                 ("train", "matches no file: give --train GLOB", patterns),
                 ("val", "matches no file: give --val GLOB", {**patterns, "data": "x"}),
                 ("hellaswag", "does not exist: give --hellaswag FILE", {"data": "x", "hellaswag": "q.bin"})]
        if outside:
            shutil.copy(kernel, old)
            cases.append(("attention", "does not exist: give --attention auto|NAME|FILE.so",
                          {"data": "x", "device": "cpu", "attention": "naive.so"}))
        status, _, err = train(*TINY, "--data", "x", "--steps", 0, "--out", "first", cwd=old)
        check(status == 0, err)
        begun = {"data": "x", "init": "first"}
        for name, _, options in (*cases, ("init", "", begun)):
            words = [word for key, value in options.items() for word in ("--" + key, value)]
            status, _, err = train(*COMMON, *words, "--steps", 3, "--stop", 2, "--out", name, cwd=old)
            check(status == 0, err)
        os.rename(old, new)
        for name, words, options in cases:
            others = [word for key, value in options.items() if key != name for word in ("--" + key, value)]
            status, _, err = train("--out", name, "--resume", *others, cwd=new)
            check((status, err) == (2, f'train_gpt: {name}/config.json: "{name}" is {old}/{options[name]}, which {words}\n'),
                  status, err)
            status, out, err = train("--out", name, "--resume", *others, "--" + name, options[name], cwd=new)
            check(status == 0 and "done at step 3" in out, status, err)
        status, _, err = train("--out", "init", "--resume", "--stop", 2, "--train", patterns["train"], "--val", patterns["val"],
                               cwd=new)
        check(status == 0, "shards were named, the model is its own checkpoint's:", err)
        shutil.rmtree(os.path.join(new, "init", "step_00000002"))
        status, _, err = train("--out", "init", "--resume", "--data", "x", cwd=new)
        check((status, err) == (2, f'train_gpt: init/config.json: "init" is {old}/first/step_00000000, which does not exist, and '
                                   "the run has no complete checkpoint: start anew, with --init PATH and another --out\n"),
              status, err)
    with test("a run in a directory whose name is no UTF-8 keeps relative paths, and is resumed from there"):
        odd = os.path.join(os.path.realpath(TMP).encode(), b"odd \xff\xfe")
        try:
            os.mkdir(odd)
        except OSError as error:
            skip(f"no such names here: {error}")
        os.rename(write_corpus(os.path.join(TMP, "odd data")), os.path.join(odd, b"x"))
        status, _, err = train(*COMMON, "--data", "x", "--steps", 4, "--stop", 2, "--out", "run", cwd=odd)
        check(status == 0, err)
        status, _, err = train("--out", "run", "--resume", cwd=odd)
        check(status == 0, err)
    with test("a run that started from a checkpoint and was killed before its first one starts from it again"):
        folder = run("from-init", *COMMON, "--data", unequal, "--steps", 3, "--save-every", 0,
                     "--init", whole + "/step_00000100")
        first = log_values(folder)
        status, out, err = train("--out", folder, "--resume")
        check(status == 0 and log_values(folder) == first, err, first[:2], log_values(folder)[:2])
    with test("a closing terminal ends the run with a checkpoint"):
        folder = os.path.join(TMP, "hangup")
        process = subprocess.Popen([TRAIN, *COMMON, "--data", unequal, "--steps", "100000", "--print-every", "1",
                                    "--out", folder], preexec_fn=hear_signals,
                                   cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while "step     30/" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGHUP)
        out, err = process.communicate()
        check(process.returncode == 130 and "stopped at step" in out, process.returncode, err)
        last = max(line["step"] for line in read_log(folder))
        check(os.path.isdir(folder + f"/step_{last:08d}"), last, os.listdir(folder))
    with test("a shard that is cut short under a run ends it with a sentence"):
        cut = write_corpus(os.path.join(TMP, "cut"), sizes=(200000,))
        process = subprocess.Popen([TRAIN, *COMMON, "--data", cut, "--steps", "100000", "--print-every", "1",
                                    "--eval-every", "0", "--save-every", "0"],
                                   cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while "step     30/" not in process.stdout.readline():
            pass
        os.truncate(os.path.join(cut, "train_0.bin"), 5000)
        _, err = process.communicate()
        check(process.returncode == 1 and "became shorter" in err, process.returncode, err)
    with test("a finished run resumed does nothing; with more steps it goes on"):
        before = log_values(whole)
        status, out, err = train("--out", whole, "--resume")
        check(status == 0 and log_values(whole) == before, out, err)
        status, out, err = train("--out", whole, "--resume", "--steps", 110)
        check(status == 0 and read_log(whole)[-1]["step"] == 110, out, err)
    with test("a run killed before its first checkpoint starts over under --resume"):
        folder = run("early", *COMMON, "--data", unequal, "--steps", 3, "--save-every", 0)
        status, out, err = train("--out", folder, "--resume", "--steps", 3)
        check(status == 0 and "no complete checkpoint" in out, out, err)
        check([line["step"] for line in read_log(folder) if "loss" in line] == [1, 2, 3], read_log(folder))
    with test("config.json holds what was asked for"):
        config = json.load(open(os.path.join(TMP, "halves", "config.json")))
        for key, value in {"lr": 3e-3, "batch_tokens": 64, "layers": 2, "schedule": "cosine"}.items():
            check(config[key] == value, f"{key} is {config[key]!r}, expected {value!r}")


try:
    main()
finally:
    shutil.rmtree(TMP, ignore_errors=True)
end()
