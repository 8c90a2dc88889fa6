#!/usr/bin/env python3
"""Shows a run in TensorBoard or Weights & Biases while it goes on.

    python3 dev/follow.py RUN [--to tensorboard|wandb] [--once]

Reads RUN/log.jsonl as it grows and passes every number on under the step that it belongs to, samples as text, and the
options of config.json. The trainer knows nothing of it: it may be started later, stopped and started again. A run that is
resumed writes some steps a second time, with the same values: they are passed on once. Ends with the last step of the run,
or with Ctrl-C; with --once after what is there.

TensorBoard's files go to RUN/tensorboard, in place of those of an earlier start, by torch.utils.tensorboard or tensorboardX,
whichever is installed; Weights & Biases by its package wandb, into --project. Without --to it is the first that is there.
"""
import argparse
import glob
import importlib
import json
import math
import os
import stat
import sys
import time

POLL = 1.0  # seconds between looks at the log


class Fault(Exception):
    """What is wrong, in one sentence."""


# --- where it goes ----------------------------------------------------------------------------------------------------

def tag_of(key):
    """A key of the log as dashboards group it: validation/loss, train/lr."""
    return "validation/" + key[4:] if key.startswith("val_") else "train/" + key


def import_first(*names):
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            pass
    return None


class TensorBoard:
    name, packages = "tensorboard", ("torch.utils.tensorboard", "tensorboardX")

    def __init__(self, module, run, config, _options):
        self.folder = os.path.join(run, "tensorboard")
        for path in glob.glob(os.path.join(glob.escape(self.folder), "events.out.tfevents.*")):
            os.unlink(path)  # the whole log is passed on again
        self.writer = module.SummaryWriter(self.folder)
        if config:
            self.writer.add_text("options", "```\n" + json.dumps(config, indent=1) + "\n```", 0)

    def where(self):
        return f"tensorboard --logdir {self.folder}"

    def numbers(self, step, values):
        for key, value in values.items():
            self.writer.add_scalar(tag_of(key), value, step)

    def text(self, step, text):
        self.writer.add_text("sample", "```\n" + text + "\n```", step)

    def flush(self):
        self.writer.flush()

    def close(self):
        self.writer.close()


class WeightsAndBiases:
    name, packages = "wandb", ("wandb",)

    def __init__(self, module, run, config, options):
        self.module = module
        self.run = module.init(project=options.project, name=os.path.basename(os.path.abspath(run)), config=config, dir=run)
        module.define_metric("step")
        module.define_metric("*", step_metric="step")  # evaluations come after the update of the same step

    def where(self):
        return getattr(self.run, "url", None) or "wandb"

    def numbers(self, step, values):
        self.module.log({"step": step, **{tag_of(key): value for key, value in values.items()}})

    def text(self, step, text):
        self.module.log({"step": step, "sample": self.module.Html("<pre>" + text.replace("&", "&amp;").replace("<", "&lt;") +
                                                                  "</pre>")})

    def flush(self):
        pass  # it sends by itself

    def close(self):
        self.module.finish()


def open_sink(run, config, options):
    """The dashboard that --to names, or the first that is installed."""
    kinds = [kind for kind in (TensorBoard, WeightsAndBiases) if options.to in (None, kind.name)]
    for kind in kinds:
        module = import_first(*kind.packages)
        if module:
            return kind(module, run, config, options)
    packages = " or ".join(package.partition(".")[0] for kind in kinds for package in kind.packages)
    installs = " or ".join({"tensorboard": "tensorboardX", "wandb": "wandb"}[kind.name] for kind in kinds)
    python = os.path.basename(sys.executable)
    raise Fault(f"needs the Python package {packages}, and {sys.executable} has none: {python} -m pip install {installs}")


# --- where it comes from ----------------------------------------------------------------------------------------------

class Log:
    """The complete lines of a log that grows, and that a resumed run replaces by a shorter one."""

    def __init__(self, path):
        self.path, self.file, self.identity, self.number = path, None, None, 0

    def lines(self):
        """What is new: (number, line)."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return
        if self.file and ((status.st_dev, status.st_ino) != self.identity or status.st_size < self.file.tell()):
            self.file.close()
            self.file = None
        if not stat.S_ISREG(status.st_mode):  # a FIFO would be waited for until somebody writes into it
            raise Fault(f"{self.path}: is not a regular file")
        if not self.file:
            self.file, self.number = open(self.path, "rb"), 0
            self.identity = (status.st_dev, status.st_ino)
        while True:
            place, line = self.file.tell(), self.file.readline()
            if not line.endswith(b"\n"):
                self.file.seek(place)
                return
            self.number += 1
            yield self.number, line


class Follower:
    """Passes on what was not passed on yet: of every key, the steps beyond the last one."""

    def __init__(self, run, sink):
        self.log, self.sink, self.last, self.step = Log(os.path.join(run, "log.jsonl")), sink, {}, -1

    def take(self):
        """Passes on what is new. Returns how many lines that were."""
        count = 0
        for count, (number, line) in enumerate(self.log.lines(), 1):
            try:
                record = json.loads(line)
                step = record["step"]
                if not isinstance(step, int) or isinstance(step, bool):
                    raise TypeError
            except (ValueError, TypeError, KeyError, RecursionError):
                raise Fault(f"{self.log.path}:{number}: expected an object with a step, got {line[:60]!r}") from None
            self.pass_on(step, record)
        if count:
            self.sink.flush()
        return count

    def pass_on(self, step, record):
        values = {key: value for key, value in record.items() if key != "step" and step > self.last.get(key, -1) and
                  isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)}
        if values:
            self.sink.numbers(step, values)
            self.last.update(dict.fromkeys(values, step))
        if isinstance(record.get("sample"), str) and step > self.last.get("sample", -1):
            self.sink.text(step, record["sample"])
            self.last["sample"] = step
        self.step = max(self.step, step)


def follow(options):
    if not os.path.isdir(options.run):
        raise Fault(f"{options.run}: is no directory, expected that of a run (--out of the trainer)")
    path, config = os.path.join(options.run, "config.json"), {}
    if os.path.exists(path) and not os.path.isfile(path):
        raise Fault(f"{path}: is not a regular file")
    if os.path.exists(path):
        try:
            with open(path, encoding="utf-8") as file:
                config = json.load(file)
        except (ValueError, RecursionError) as fault:
            raise Fault(f"{path}: is no JSON: {fault}") from None
        if not isinstance(config, dict):
            raise Fault(f"{path}: is {type(config).__name__}, expected an object with the options of the run")
    steps = config.get("steps")
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool)):
        raise Fault(f"{path}: steps is {json.dumps(steps)[:60]}, expected an integer")
    log = os.path.join(options.run, "log.jsonl")
    if options.once and not os.path.exists(log):  # else it may yet come
        raise Fault(f"{log}: no such file: the run has logged nothing, or {options.run} is that of no run")
    sink = open_sink(options.run, config, options)
    try:
        follower = Follower(options.run, sink)
        print(f"following {options.run}: {sink.where()}", flush=True)
        idle = 0  # looks in a row at which nothing was new: samples and evaluations come after the last step
        while not (options.once and idle) and not (idle > 2 and steps is not None and follower.step >= steps):
            idle = 0 if follower.take() else idle + 1
            if idle and not options.once:
                time.sleep(POLL)
        print(f"passed on up to step {follower.step}")
    except KeyboardInterrupt:
        print(f"stopped at step {follower.step}")
    finally:
        sink.close()


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="directory of a run")
    parser.add_argument("--to", choices=("tensorboard", "wandb"), help="the dashboard (the first that is installed)")
    parser.add_argument("--once", action="store_true", help="end after what is there")
    parser.add_argument("--project", default="flashgpt", metavar="NAME", help="of Weights & Biases (flashgpt)")
    options = parser.parse_args(arguments)
    try:
        follow(options)
    except Fault as fault:
        print(f"follow.py: {fault}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"follow.py: {error.filename or options.run}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
