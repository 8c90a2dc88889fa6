#!/usr/bin/env python3
"""Lays the curves of training runs over each other, step by step.

    python3 dev/compare.py RUN RUN... [--png FILE] [--html FILE] [--max-difference X] [--key loss]

A RUN is a folder with log.jsonl, or such a file, of train_gpt or dev/reference.py. Every run is compared with the first: for
loss, val_loss and grad_norm it prints how many steps both have, the largest absolute difference (and at which step), and
the mean. --png draws the curves of --key and the differences below them, where matplotlib is installed. --html writes the
page that the trainer writes of a run (trainer/report.html) with all the runs laid over each other, options that differ
marked. A FILE that is there is written over only where its name ends in .png or .html. Exits 1 when a difference in --key is
above --max-difference, or two runs have no step of it in common; 2 when an input cannot be read or a FILE not written. A
last line that a killed run did not finish is left out.

The standard library alone computes the numbers.
"""
import argparse
import bisect
import datetime
import json
import math
import os
import stat
import sys

KEYS = ("loss", "val_loss", "grad_norm")


class Fault(Exception):
    """What is wrong with the input, in one sentence."""


class Run:
    """A name for the legend, and for each key the values by step."""

    def __init__(self, path):
        self.path = os.path.join(path, "log.jsonl") if os.path.isdir(path) else path
        self.name = path.rstrip("/")
        self.series = {}
        self.samples = []
        try:
            with open_regular(self.path, errors="replace") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        self.add(line, number)
        except OSError as fault:
            raise Fault(f"{self.path}: {fault.strerror}") from None
        if not self.series:
            raise Fault(f"{self.path}: holds no step")

    def add(self, line, number):
        """Takes the values of one line. A step that comes again (a resumed run) replaces the earlier one."""
        try:
            record = json.loads(line, parse_int=float)
        except (ValueError, RecursionError) as fault:
            if not line.endswith("\n"):
                print(f"compare.py: {self.path}:{number}: the last line is cut off, and left out", file=sys.stderr)
                return
            raise Fault(f"{self.path}:{number}: not JSON: {fault}") from None
        if not isinstance(record, dict):
            raise Fault(f"{self.path}:{number}: is {type(record).__name__}, expected an object")
        step = record.get("step")
        if not is_number(step) or step != int(step) or step < 0:
            raise Fault(f"{self.path}:{number}: step is {json.dumps(step)}, expected an integer of 0 or more")
        for key, value in record.items():
            if key == "sample" and isinstance(value, str):
                self.samples.append((int(step), value))
            if key == "step" or value is None or isinstance(value, str):
                continue
            if not is_number(value, finite=False):
                raise Fault(f"{self.path}:{number}: {key} is {json.dumps(value)}, expected a number")
            self.series.setdefault(key, {})[int(step)] = float(value)


def open_regular(path, errors="strict"):
    """Opens a text to be read. What is no file is refused: a FIFO would be waited for until somebody writes into it."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise Fault(f"{path}: is not a regular file")
    return open(path, encoding="utf-8", errors=errors)


def check_target(path, ending, runs):
    """Refuses to write over anything but an earlier picture or page: a log, for one."""
    try:
        status = os.stat(path)
    except OSError:  # not there; or else writing it says why not
        return
    if not stat.S_ISREG(status.st_mode):
        raise Fault(f"{path}: is not a regular file")
    if not os.path.realpath(path).endswith(ending) or any(os.path.samefile(path, run.path) for run in runs):
        raise Fault(f"{path}: is there already, and no {ending} file of an earlier comparison: not written over")


def is_number(value, finite=True):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and (not finite or math.isfinite(value))


def name_runs(runs):
    """Shortens the names to what tells the runs apart: what all paths begin with goes."""
    parts = [os.path.normpath(run.name).split(os.sep) for run in runs]
    while all(len(part) > 1 for part in parts) and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    for run, part in zip(runs, parts):
        run.name = os.sep.join(part)


def differences(first, other, key):
    """|other - first| by step, over the steps that both runs have. Equal infinities do not differ; a NaN differs by NaN."""
    a, b = first.series.get(key, {}), other.series.get(key, {})
    return {step: 0.0 if a[step] == b[step] else abs(b[step] - a[step]) for step in sorted(a.keys() & b.keys())}


def worst_step(difference):
    """The step of the largest difference, NaN counting as the largest of all; the earliest of equals."""
    return max(difference, key=lambda step: (math.isnan(difference[step]), difference[step], -step))


def compare(first, other, keys):
    """Rows of the table for one pair: name, key, common steps, largest, its step, mean."""
    rows = []
    for key in keys:
        difference = differences(first, other, key)
        if difference:
            worst = worst_step(difference)
            rows.append((other.name, key, str(len(difference)), f"{difference[worst]:.3e}", str(worst),
                         f"{math.fsum(difference.values()) / len(difference):.3e}"))
        elif key in first.series or key in other.series:
            rows.append((other.name, key, "0", "-", "-", "-"))
    return rows


def print_table(first, rows):
    head = (f"against {first.name}", "key", "common steps", "largest", "at step", "mean")
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    for row in (head, *rows):
        cells = [cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip())


def find_faults(runs, key, limit):
    """Sentences for every pair that fails: no step in common, or a difference above the limit."""
    faults = []
    for other in runs[1:]:
        difference = differences(runs[0], other, key)
        if not difference:
            faults.append(f"{runs[0].path} and {other.path} have no step with {key} in common")
            continue
        worst = worst_step(difference)
        if limit is not None and not difference[worst] <= limit:
            faults.append(f"{key} of {other.path} differs by {difference[worst]:.3e} from {runs[0].path} at step {worst}, "
                          f"above the limit of {limit:g}")
    return faults


# --- the picture -----------------------------------------------------------------------------------------------------------

COLOURS = ("#20639b", "#d1495b", "#2e9e6b", "#edae49", "#7b4fa3", "#3caea3", "#8c5a33", "#555555")
DASHES = ((0, ()), (0, (5, 3)), (0, (2, 2)), (0, (8, 3, 2, 3)))
MOST_POINTS = 600


def stretches(points):
    """Cuts a series into at most MOST_POINTS stretches: middle step, least, mean and greatest value of each."""
    length = -(-len(points) // MOST_POINTS)
    cut = [points[first:first + length] for first in range(0, len(points), length)]
    values = [[value for _, value in part] for part in cut]
    return ([part[len(part) // 2][0] for part in cut], [min(part) for part in values],
            [math.fsum(part) / len(part) for part in values], [max(part) for part in values])


def finite_points(series):
    return [(step, value) for step, value in sorted(series.items()) if math.isfinite(value)]


def draw_curves(axes, runs, key):
    """The first run broad and pale, the others thin over it, so that curves that agree are still all seen. A long series
    is drawn as the mean of short stretches, with a band from the least to the greatest of each."""
    for i, run in enumerate(runs):
        points = finite_points(run.series.get(key, {}))
        if not points:
            continue
        colour = COLOURS[i % len(COLOURS)]
        steps, least, mean, greatest = stretches(points)
        axes.plot(steps, mean, color=colour, linewidth=1.4 if i else 4.0, alpha=1 if i else 0.45,
                  linestyle=DASHES[i % len(DASHES)], marker="." if len(points) == 1 else None,
                  label=f"{run.name}: {points[-1][1]:.4f} at step {points[-1][0]}")
        if len(points) > MOST_POINTS:
            axes.fill_between(steps, least, greatest, color=colour, alpha=0.15 / len(runs) + 0.05, linewidth=0)
    for i, run in enumerate(runs):
        points = finite_points(run.series.get("val_loss", {})) if key == "loss" else []
        if points:
            steps, _, mean, _ = stretches(points)
            axes.plot(steps, mean, color=COLOURS[i % len(COLOURS)], linestyle="none", marker="x" if i else "o",
                      markersize=5 if i else 8, markerfacecolor="none",
                      label=f"{run.name}: validation {points[-1][1]:.4f}")
    axes.set_ylabel(key.replace("_", " "))
    axes.legend(frameon=False, fontsize=9)


def draw_differences(axes, runs, key):
    """The largest difference of each stretch as a line, with a band down to the mean where a stretch is more than a step."""
    common = drawn = False
    for i, run in enumerate(runs[1:], 1):
        common = common or bool(differences(runs[0], run, key))
        points = [point for point in finite_points(differences(runs[0], run, key)) if point[1] > 0]
        if points:
            drawn = True
            colour = COLOURS[i % len(COLOURS)]
            steps, _, mean, greatest = stretches(points)
            axes.plot(steps, greatest, color=colour, linewidth=1.0, marker="." if len(points) < 60 else None)
            if len(points) > MOST_POINTS:
                axes.fill_between(steps, mean, greatest, color=colour, alpha=0.2, linewidth=0)
    if drawn:
        axes.set_yscale("log")
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no difference at all" if common else "no step in common", transform=axes.transAxes,
                  ha="center", va="center", color="#555555")
    axes.set_ylabel("|difference|")


def draw(runs, key, path):
    """Writes the picture."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise Fault(f"{path} is not drawn: matplotlib is not installed for {sys.executable}") from None
    heights = (2.2, 1) if len(runs) > 1 else (1,)
    figure, panels = pyplot.subplots(len(heights), 1, sharex=True, squeeze=False, figsize=(9, 2.5 + 2 * sum(heights) / 1.6),
                                     gridspec_kw={"height_ratios": heights})
    panels = [row[0] for row in panels]
    draw_curves(panels[0], runs, key)
    if len(runs) > 1:
        panels[0].set_title(f"{key.replace('_', ' ')}, and its difference to {runs[0].name}", loc="left", fontsize=11)
        draw_differences(panels[1], runs, key)
    panels[-1].set_xlabel("step")
    for axes in panels:
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as fault:
        raise Fault(f"{path}: {fault}") from None
    print(f"drew {path}")


# --- the page --------------------------------------------------------------------------------------------------------------

PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "trainer", "report.html")
MOST_SAMPLES = 12


def seconds_by_step(run):
    """A function from a step to the seconds of training up to it, by the logged milliseconds."""
    steps, seconds, total = [], [], 0.0
    for step, milliseconds in finite_points(run.series.get("ms", {})):
        total += 1e-3 * milliseconds
        steps.append(step)
        seconds.append(total)

    def find(step):
        place = bisect.bisect_right(steps, step)
        return seconds[place - 1] if place else 0.0
    return find


def page_points(series, seconds):
    """A series as the page takes it: [step, seconds, mean, least, greatest] of at most MOST_POINTS stretches."""
    points = finite_points(series)
    length = -(-len(points) // MOST_POINTS) or 1
    cut = [points[first:first + length] for first in range(0, len(points), length)]
    return [[math.fsum(step for step, _ in part) / len(part), math.fsum(seconds(step) for step, _ in part) / len(part),
             math.fsum(value for _, value in part) / len(part), min(value for _, value in part),
             max(value for _, value in part)] for part in cut]


def read_config(path):
    """The options of a run; none where there is only a log."""
    try:
        with open_regular(path) as file:
            config = json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as fault:
        raise Fault(f"{path}: {fault}") from None
    if not isinstance(config, dict):
        raise Fault(f"{path}: is {type(config).__name__}, expected an object")
    return config


def page_run(run, first):
    """What the page is told of a run; the difference in loss of any but the first."""
    seconds = seconds_by_step(run)
    series = dict(run.series)
    if run is not first:
        series["difference"] = {step: value for step, value in differences(first, run, "loss").items() if value > 0}
    pointed = {key: page_points(values, seconds) for key, values in series.items()}
    config = read_config(os.path.join(os.path.dirname(run.path), "config.json"))
    last = int(max(max(values) for values in run.series.values() if values))
    state = f"step {last}" + (f" of {config['steps']}" if "steps" in config else "")
    return {"name": run.name, "state": state, "floor": None, "facts": [["log", run.path]], "config": config,
            "samples": run.samples[-MOST_SAMPLES:],
            "series": {key: points for key, points in pointed.items() if points}}


def write_page(runs, path):
    try:
        with open(PAGE, encoding="utf-8") as file:
            before, after = file.read().split("@DATA@")
        data = {"written": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), "running": False,
                "runs": [page_run(run, runs[0]) for run in runs]}
        with open(path, "w", encoding="utf-8") as file:
            file.write(before + json.dumps(data).replace("<", "\\u003c") + after)
    except OSError as fault:
        raise Fault(f"{fault.filename or path}: {fault.strerror}") from None
    print(f"wrote {path}")


def parse_limit(text):
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not limit >= 0:
        raise argparse.ArgumentTypeError(f"got '{text}', expected a number of 0 or more")
    return limit


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, or its log.jsonl")
    parser.add_argument("--png", metavar="FILE", help="draw the curves and differences")
    parser.add_argument("--html", metavar="FILE", help="write a page with the runs laid over each other")
    parser.add_argument("--max-difference", type=parse_limit, metavar="X",
                        help="exit 1 where --key differs by more at any step")
    parser.add_argument("--key", default="loss", metavar="KEY", help="what --png and --max-difference look at (loss)")
    options = parser.parse_args(arguments)
    try:
        runs = [Run(path) for path in options.runs]
        for path, ending in ((options.png, ".png"), (options.html, ".html")):
            if path:
                check_target(path, ending, runs)
        name_runs(runs)
        if options.key not in runs[0].series:
            raise Fault(f"{runs[0].path}: has no {options.key}, only {', '.join(sorted(runs[0].series))}")
        keys = KEYS if options.key in KEYS else KEYS + (options.key,)
        if len(runs) > 1:
            print_table(runs[0], [row for other in runs[1:] for row in compare(runs[0], other, keys)])
        if options.html:
            write_page(runs, options.html)
        if options.png:
            draw(runs, options.key, options.png)
    except Fault as fault:
        print(f"compare.py: {fault}", file=sys.stderr)
        return 2
    faults = find_faults(runs, options.key, options.max_difference)
    for fault in faults:
        print(f"compare.py: {fault}", file=sys.stderr)
    return 1 if faults else 0


def main_of_process():
    """main, for which a reader of stdout that goes away is an end and a full disk a sentence."""
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
        return status
    except OSError as fault:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered would be tried again at the exit
        if not isinstance(fault, BrokenPipeError):
            print(f"compare.py: standard output cannot be written: {fault.strerror}", file=sys.stderr)
        return 141 if isinstance(fault, BrokenPipeError) else 2


if __name__ == "__main__":
    sys.exit(main_of_process())
