#!/usr/bin/env python3
"""OUT/report.html: its figures are those of the log, also after a resume; it asks nothing of the network and runs nothing
that a model wrote; a page that cannot be written does not cost the run. And in headless Chromium, where there is one: no
error on the console, every plot drawn, of one run and of several (dev/compare.py --html).

CHROMIUM names a browser; without it the usual names are tried."""
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from check import check, end, skip, test  # noqa: E402
from trainer_runs import ROOT, TINY, TRAIN, read_log, train, write_corpus  # noqa: E402

TMP = tempfile.mkdtemp(prefix="flashgpt-report-")
POINTS = 800  # as in trainer/report.c
DATA = write_corpus(os.path.join(TMP, "data"))
OPTIONS = [*TINY, "--data", DATA, "--print-every", 0, "--device", "cpu"]
EVIL = "</script><script>document.title='owned'</script><b>"


def path_of(name):
    return os.path.join(TMP, name)


def read_page(path):
    """(the page, its data)."""
    with open(path, encoding="utf-8") as file:
        page = file.read()
    return page, json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def expected_points(log, key):
    """The points of a key by the words of report.c: as few values each, a power of two, as make at most POINTS."""
    seconds, values = 0.0, []
    for line in log:
        seconds += line.get("ms", 0) / 1e3
        if line.get(key) is not None:
            values.append((line["step"], seconds, line[key]))
    each = 1
    while len(values) > POINTS * each:
        each *= 2
    cut = [values[first:first + each] for first in range(0, len(values), each)]
    return [[sum(value[i] for value in part) / len(part) for i in range(3)] +
            [min(value[2] for value in part), max(value[2] for value in part)] for part in cut]


def check_points(found, wanted, key, columns=range(5)):
    check(len(found) == len(wanted), key, "has", len(found), "points, expected", len(wanted))
    for place, (one, other) in enumerate(zip(found, wanted)):
        for column in columns:
            if not math.isclose(one[column], other[column], rel_tol=1e-5, abs_tol=1e-9):
                return check(False, key, "point", place, "column", column, "is", one[column], "expected", other[column])
    return None


def test_data():
    run = path_of("run")
    with test("the page's figures are those of the log, a long one's merged; evaluations, samples, options too"):
        status, _, err = train(*OPTIONS, "--steps", 1700, "--eval-every", 100, "--sample-every", 100, "--sample-tokens", 3,
                               "--out", run, "--prompt", EVIL)
        check(status == 0, err)
        page, data = read_page(os.path.join(run, "report.html"))
        shown, log = data["runs"][0], read_log(run)
        for key in ("loss", "lr", "grad_norm", "tokens_per_second", "val_loss"):
            check_points(shown["series"][key], expected_points(log, key), key)
        check("mfu" not in shown["series"], "a number that is null everywhere has a series")
        check(len(shown["series"]["loss"]) == 425 and len(shown["series"]["val_loss"]) == 18, "not the expected merging")
        samples = [[line["step"], line["sample"]] for line in log if "sample" in line]
        check(len(samples) == 17 and shown["samples"] == samples[-12:], shown["samples"], samples[-12:])
        check(shown["name"] == run and data["running"] is False, shown["name"], data["running"])
        check(shown["state"].startswith("step 1700 of 1700, ") and shown["state"].endswith(": done"), shown["state"])
        with open(os.path.join(run, "config.json")) as file:
            check(shown["config"] == json.load(file), "the options differ from config.json's")
        facts = dict(shown["facts"])
        check("2 layers" in facts["model"] and "; val " in facts["data"] and "attention" in facts["kernel"], facts)
        check(len(page) < 300_000, len(page), "bytes")
    with test("the page stands alone: no address but SVG's name, and what a model wrote begins no tag"):
        check(set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}, "addresses in the page")
        check(not re.search(r"<(img|iframe|object|embed|base)\b|\bsrc=|@import|url\((?!#)", page), "it loads something")
        check(page.count("</script>") == 2 and EVIL in shown["samples"][0][1], page.count("</script>"))
        check(os.listdir(run).count(".report.html.tmp") == 0, "a temporary was left")


def test_states():
    with test("a stopped run says so; resumed, its page has the whole course, as the unbroken one's"):
        run, whole = path_of("stopped"), path_of("whole")
        options = [*OPTIONS, "--steps", 40, "--eval-every", 8]
        train(*options, "--out", whole)
        status, _, err = train(*options, "--stop", 25, "--out", run)
        _, data = read_page(os.path.join(run, "report.html"))
        state = data["runs"][0]["state"]
        check(status == 0 and state.endswith(": stopped") and not data["running"], err, state)
        status, _, err = train("--out", run, "--resume")
        _, data = read_page(os.path.join(run, "report.html"))
        _, unbroken = read_page(os.path.join(whole, "report.html"))
        check(status == 0 and len(data["runs"][0]["series"]["loss"]) == 40, err)
        for key in ("loss", "val_loss", "lr", "grad_norm"):
            check_points(data["runs"][0]["series"][key], unbroken["runs"][0]["series"][key], key, (0, 2, 3, 4))
        check_points(data["runs"][0]["series"]["loss"], expected_points(read_log(run), "loss"), "loss")
    with test("a run that fails leaves its sentence in the page"):
        run = path_of("failed")
        status, _, err = train(*OPTIONS, "--steps", 200, "--lr", "1e18", "--clip", 0, "--eval-every", 0, "--out", run)
        _, data = read_page(os.path.join(run, "report.html"))
        check(status == 1 and not data["running"], status, err)
        check("not finite" in data["runs"][0]["state"] and "not finite" in err, data["runs"][0]["state"], err)
    with test("while a run goes on, its page is there, says so and is whole at any moment"):
        run = path_of("running")
        process = subprocess.Popen([TRAIN, *map(str, OPTIONS), "--steps", "60000", "--eval-every", "50", "--out", run],
                                   cwd=ROOT, stdout=subprocess.PIPE, text=True)
        seen = set()
        try:
            for _ in process.stdout:
                if os.path.exists(os.path.join(run, "report.html")):
                    _, data = read_page(os.path.join(run, "report.html"))
                    check(data["running"] is True, data["runs"][0]["state"])
                    seen.add(data["runs"][0]["state"])
                if len(seen) == 3:
                    break
        finally:
            process.terminate()
            process.stdout.close()
            process.wait()
        check(len(seen) == 3, "states that were seen:", seen)
    with test("a page that cannot be written is said once, and costs the run nothing"):
        run = path_of("blocked")
        os.makedirs(os.path.join(run, "report.html"))
        status, out, err = train(*OPTIONS, "--steps", 20, "--eval-every", 5, "--out", run)
        check(status == 0 and not err, status, err)
        check(out.count("report   not written: ") == 1 and "report.html: Is a directory" in out, out)
        check(len(expected_points(read_log(run), "loss")) == 20, "the log is not whole")


def compare(*arguments):
    script = os.path.join(ROOT, "dev", "compare.py")
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)


def test_compare():
    other, page = path_of("other"), path_of("both.html")
    with test("dev/compare.py --html: both runs' figures, the difference, options, on the same page"):
        train(*OPTIONS, "--steps", 300, "--eval-every", 100, "--lr", "1e-3", "--out", other)
        done = compare(path_of("run"), other, "--html", page)
        check(done.returncode == 0 and f"wrote {page}" in done.stdout, done.stdout, done.stderr)
        _, data = read_page(page)
        check([run["name"] for run in data["runs"]] == ["run", "other"], [run["name"] for run in data["runs"]])
        logs = read_log(path_of("run")), read_log(other)
        check_points(data["runs"][1]["series"]["loss"], expected_points(logs[1], "loss"), "loss")
        check_points(data["runs"][1]["series"]["val_loss"], expected_points(logs[1], "val_loss"), "val_loss")
        loss = [{line["step"]: line["loss"] for line in log if "loss" in line} for log in logs]
        wanted = [[step, abs(loss[0][step] - value)] for step, value in loss[1].items() if loss[0][step] != value]
        found = [[point[0], point[2]] for point in data["runs"][1]["series"]["difference"]]
        near = all(math.isclose(one[1], other[1], rel_tol=1e-9) for one, other in zip(found, wanted))
        check(len(found) == len(wanted) and near, "the differences are not those of the logs")
        check("difference" not in data["runs"][0]["series"] and data["runs"][1]["config"]["lr"] == 1e-3, "first run")
        check(sum(point[2] for point in data["runs"][0]["series"]["loss"]) > 0 and data["runs"][0]["samples"], "samples")
    with test("dev/compare.py --html: a log alone will do; what cannot be read or written is a sentence"):
        shutil.copy(os.path.join(other, "log.jsonl"), path_of("alone.jsonl"))
        for arguments, status, words in (([path_of("alone.jsonl"), "--html", page], 0, "wrote"),
                                         ([other, "--html", path_of("none/x.html")], 2, "none/x.html: No such file")):
            done = compare(*arguments)
            check(done.returncode == status and words in done.stdout + done.stderr, done.stdout, done.stderr)
        shutil.copytree(other, path_of("spoilt"))
        with open(os.path.join(path_of("spoilt"), "config.json"), "w") as file:
            file.write("[1, 2]")
        done = compare(path_of("spoilt"), "--html", page)
        check(done.returncode == 2 and "config.json: is list" in done.stderr, done.stderr)


# --- in a browser -----------------------------------------------------------------------------------------------------

def find_browser():
    names = [os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
    return next((found for found in (name and shutil.which(name) for name in names) if found), None)


def browse(address):
    """(the page as it stands after its scripts, what the console got), from headless Chromium."""
    browser = find_browser()
    if not browser:
        skip("no Chromium")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom", address,
               f"--user-data-dir={path_of('profile')}", "--window-size=1280,1700", "--virtual-time-budget=2000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "<html" not in done.stdout:
        skip("Chromium does not start here: " + done.stderr.strip()[-200:])
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def drawing_faults(dom, lines):
    """Why the page is not drawn as it should be: every figure of `lines` (plot -> number of curves in it) is there with that
    many curves, axes and no broken number."""
    faults, figures = [], dict(re.findall(r'<figure [^>]*data-plot="(\w+)">(.*?)</figure>', dom, re.S))
    if set(figures) != set(lines):
        faults.append(f"figures {sorted(figures)}, expected {sorted(lines)}")
    for plot, svg in figures.items():
        curves = re.findall(r'<path [^>]*data-key="\w+"[^>]* d="(M[^"]*)"', svg)
        if len(curves) != lines.get(plot):
            faults.append(f"{plot} has {len(curves)} curves, expected {lines.get(plot)}")
        for curve in curves:
            places = [tuple(map(float, place.split())) for place in curve[1:].split("L")]
            if len(places) < 3 or len({y for _, y in places}) < 2 or not all(50 <= x <= 1280 for x, _ in places):
                faults.append(f"{plot} has no curve within its axes: {curve[:80]}")
        if len(re.findall("<text", svg)) < 5 or "NaN" in svg or "Infinity" in svg:
            faults.append(f"{plot} has no axes or broken numbers")
    if f'data-drawn="{len(lines)}"' not in dom:
        faults.append("the script did not come to its end")
    return faults


def test_browser():
    one = {"loss": 2, "grad_norm": 1, "lr": 1, "tokens_per_second": 1}
    with test("browser: the page of a run: no error on the console, every plot drawn, over steps and time, linear and log"):
        for view in ("", "#time,linear", "#steps,log", "#time,log"):
            dom, console = browse("file://" + os.path.join(path_of("run"), "report.html") + view)
            check(not console, view, console[:3])
            faults = drawing_faults(dom, one)
            check(not faults, view, faults)
        check("owned" not in re.search("<title>(.*?)</title>", dom)[1] and "&lt;/script&gt;" in dom, "the sample was run")
        check("<td>gpt2</td>" in dom or "<td>layers</td>" in dom, "no table of options")
    with test("browser: the page of several runs"):
        compare(path_of("run"), path_of("other"), "--html", path_of("both.html"))
        dom, console = browse("file://" + path_of("both.html"))
        check(not console, console[:3])
        faults = drawing_faults(dom, {"loss": 4, "difference": 1, "grad_norm": 2, "lr": 2, "tokens_per_second": 2})
        check(not faults, faults)
        check(re.search(r'<tr class="differs"><td>lr</td>', dom), "the options that differ are not marked")
    with test("browser: what these checks do not let pass: a script that fails, a plot or a curve that is missing"):
        with open(os.path.join(path_of("run"), "report.html"), encoding="utf-8") as file:
            page = file.read()
        for old, new in (("drawAll();\nfillSummary", "drawAll(;\nfillSummary"), ('"lr": [', '"ms": ['),
                         ('"val_loss": [', '"val_los": ['), ("const atY = (value) => TOP", "const atY = (value) => NaN"),
                         ("const atX = (value) => LEFT", "const atX = (value) => LEFT + 2000")):
            check(page.count(old) == 1, "the page has no", old)
            with open(path_of("broken.html"), "w", encoding="utf-8") as file:
                file.write(page.replace(old, new))
            dom, console = browse("file://" + path_of("broken.html"))
            check(console or drawing_faults(dom, one), new, "passed")


def main():
    try:
        test_data()
        test_states()
        test_compare()
        test_browser()
    finally:
        shutil.rmtree(TMP, ignore_errors=True)
    end()


if __name__ == "__main__":
    main()
