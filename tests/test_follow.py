#!/usr/bin/env python3
"""dev/follow.py: what it passes on from a log that grows, is cut and is replaced, to stand-ins for the packages of
TensorBoard and Weights & Biases that write down their calls; its sentences without them."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
from check import check, end, test  # noqa: E402

FOLLOW = os.path.join(HERE, "..", "dev", "follow.py")
TMP = tempfile.mkdtemp(prefix="flashgpt-follow-")
BLOCK = "raise ImportError('blocked')\n"
RECORD = """import json, os
def record(*what):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps(what) + "\\n")
"""
TENSORBOARD = RECORD + """
class SummaryWriter:
    def __init__(self, folder):
        record("open", folder)
    def add_scalar(self, tag, value, step):
        record("scalar", tag, value, step)
    def add_text(self, tag, text, step):
        record("text", tag, text, step)
    def flush(self):
        pass
    def close(self):
        record("close")
"""
WANDB = RECORD + """
def init(project, name, config, dir):
    record("init", project, name, config)
def define_metric(name, step_metric=None):
    record("metric", name, step_metric)
def log(values):
    record("log", values)
def Html(text):
    return text
def finish():
    record("finish")
"""


def path_of(*names):
    return os.path.join(TMP, *names)


def write_packages(folder, **modules):
    """A folder for PYTHONPATH in which torch, tensorboardX and wandb are these, or cannot be imported."""
    os.makedirs(path_of(folder), exist_ok=True)
    for name in ("torch", "tensorboardX", "wandb"):
        with open(path_of(folder, name + ".py"), "w") as file:
            file.write(modules.get(name, BLOCK))
    return path_of(folder)


def write_run(name, lines, steps=None):
    os.makedirs(path_of(name), exist_ok=True)
    if steps is not None:
        with open(path_of(name, "config.json"), "w") as file:
            json.dump({"steps": steps, "lr": 0.5}, file)
    with open(path_of(name, "log.jsonl"), "w") as file:
        file.writelines(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    return path_of(name)


def start(packages, *arguments):
    environment = {**os.environ, "PYTHONPATH": packages, "CALLS": path_of("calls")}
    if os.path.exists(path_of("calls")):
        os.unlink(path_of("calls"))
    return subprocess.Popen([sys.executable, FOLLOW, *arguments], env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def finish(process):
    """(status, output, errors) once it ends."""
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


def calls(kind=None):
    if not os.path.exists(path_of("calls")):
        return []
    with open(path_of("calls")) as file:
        return [call for call in map(json.loads, file) if kind in (None, call[0])]


def wait_for(condition):
    deadline = time.time() + 30
    while not condition() and time.time() < deadline:
        time.sleep(0.05)
    return check(condition(), "it did not come:", calls())


def step(number, loss):
    return {"step": number, "loss": loss, "lr": 0.1, "mfu": None}


def main():
    board, weights = write_packages("board", tensorboardX=TENSORBOARD), write_packages("weights", wandb=WANDB)
    with test("TensorBoard: every number under its step and tag, samples, options; --once ends after what is there"):
        run = write_run("run", [{"step": 0, "val_loss": 9.0}, step(1, 4.0), step(2, 3.0), {"step": 2, "val_loss": 3.5},
                                {"step": 2, "sample": "some <text>"}, '{"step": 3, "lo'], steps=10)
        status, output, errors = finish(start(board, run, "--once"))
        check(status == 0 and "up to step 2" in output and os.path.join(run, "tensorboard") in output, output, errors)
        check(calls("scalar") == [["scalar", "validation/loss", 9.0, 0], ["scalar", "train/loss", 4.0, 1],
                                  ["scalar", "train/lr", 0.1, 1], ["scalar", "train/loss", 3.0, 2],
                                  ["scalar", "train/lr", 0.1, 2], ["scalar", "validation/loss", 3.5, 2]], calls("scalar"))
        check(["some <text>" in call[2] for call in calls("text")] == [False, True] and '"lr": 0.5' in calls("text")[0][2],
              calls("text"))
        check(calls()[-1] == ["close"], calls()[-1])
    with test("a log that grows, is cut in mid-line, is replaced by a resumed run's: each step once, and an end by itself"):
        run = write_run("grows", [step(1, 4.0), step(2, 3.0)], steps=6)
        process = start(board, run)
        wait_for(lambda: len(calls("scalar")) == 4)
        with open(os.path.join(run, "log.jsonl"), "a") as file:
            file.write(json.dumps(step(3, 2.5)) + "\n" + '{"step": 4, "lo')
            file.flush()
            wait_for(lambda: len(calls("scalar")) == 6)
            file.write('ss": 2.25, "lr": 0.1}\n')
        wait_for(lambda: len(calls("scalar")) == 8)
        with open(os.path.join(run, "log.new"), "w") as file:
            file.writelines(json.dumps(step(number, 4.0)) + "\n" for number in (1, 2))
        os.rename(os.path.join(run, "log.new"), os.path.join(run, "log.jsonl"))
        with open(os.path.join(run, "log.jsonl"), "a") as file:
            file.writelines(json.dumps(step(number, 1.0)) + "\n" for number in (3, 4, 5, 6))
            file.write(json.dumps({"step": 6, "val_loss": 1.5}) + "\n")
        status, output, errors = finish(process)
        check(status == 0 and "up to step 6" in output, status, output, errors)
        losses = [call[2:] for call in calls("scalar") if call[1] == "train/loss"]
        check(losses == [[4.0, 1], [3.0, 2], [2.5, 3], [2.25, 4], [1.0, 5], [1.0, 6]], losses)
        check([call[2:] for call in calls("scalar") if call[1] == "validation/loss"] == [[1.5, 6]], "validation")
    with test("Weights & Biases: the same numbers, with the step as their axis, text that is no markup"):
        status, output, errors = finish(start(weights, path_of("run"), "--once", "--project", "mine"))
        check(status == 0, output, errors)
        check(calls("init") == [["init", "mine", "run", {"steps": 10, "lr": 0.5}]], calls("init"))
        check(["metric", "*", "step"] in calls("metric"), calls("metric"))
        logged = [call[1] for call in calls("log")]
        check(logged[:2] == [{"step": 0, "validation/loss": 9.0}, {"step": 1, "train/loss": 4.0, "train/lr": 0.1}], logged)
        check(logged[-1] == {"step": 2, "sample": "<pre>some &lt;text></pre>"} and calls()[-1] == ["finish"], logged[-1])
    with test("--to chooses where both are there"):
        both = write_packages("both", tensorboardX=TENSORBOARD, wandb=WANDB)
        for name, kind in (("wandb", "init"), ("tensorboard", "open")):
            check(finish(start(both, path_of("run"), "--once", "--to", name))[0] == 0 and calls(kind), name, calls())
    with test("refusals: one sentence each"):
        none = write_packages("none")
        write_run("bad", [step(1, 4.0), "no object\n"])
        write_run("stepless", ['{"loss": 1}\n'])
        write_run("options", [step(1, 4.0)], steps=1)
        with open(path_of("options", "config.json"), "w") as file:
            file.write("{")
        for name, text in (("list", "[1]"), ("word", '{"steps": "many"}')):
            with open(os.path.join(write_run(name, [step(1, 4.0)]), "config.json"), "w") as file:
                file.write(text)
        os.makedirs(path_of("data"))
        os.makedirs(path_of("fifo"))
        os.mkfifo(path_of("fifo", "log.jsonl"))
        os.mkfifo(os.path.join(write_run("fifo_config", [step(1, 4.0)]), "config.json"))
        for packages, arguments, words in ((none, [path_of("run")], "tensorboardX or wandb"),
                                           (none, [path_of("run"), "--to", "wandb"], "-m pip install wandb"),
                                           (board, [path_of("nowhere")], "nowhere: is no directory"),
                                           (board, [path_of("bad"), "--once"], "log.jsonl:2: expected an object"),
                                           (board, [path_of("stepless"), "--once"], "log.jsonl:1: expected an object"),
                                           (board, [path_of("options")], "config.json: is no JSON"),
                                           (board, [path_of("list")], "config.json: is list, expected an object"),
                                           (board, [path_of("word")], 'config.json: steps is "many", expected an integer'),
                                           (board, [path_of("fifo")], "log.jsonl: is not a regular file"),
                                           (board, [path_of("fifo_config")], "config.json: is not a regular file"),
                                           (board, [path_of("data"), "--once"], "log.jsonl: no such file")):
            status, output, errors = finish(start(packages, *arguments))
            check(status == 1 and words in errors and errors.count("\n") == 1, arguments, status, errors)
        check(not os.listdir(path_of("data")), "a directory of no run was written to:", os.listdir(path_of("data")))
    shutil.rmtree(TMP, ignore_errors=True)
    end()


if __name__ == "__main__":
    main()
