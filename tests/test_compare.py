#!/usr/bin/env python3
"""dev/compare.py: its figures, its exit status, its sentences for bad input, and the picture where matplotlib is there."""
import json
import math
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
from check import check, end, skip, test  # noqa: E402

COMPARE = os.path.join(HERE, "..", "dev", "compare.py")
FOLDER = tempfile.TemporaryDirectory()


def path(name):
    return os.path.join(FOLDER.name, name)


def write_run(name, losses, evaluations=None, extra=""):
    """A run folder: losses by step, validation losses by step, more lines at the end."""
    os.makedirs(path(name), exist_ok=True)
    lines = [{"step": step, "loss": loss, "lr": 1e-3, "grad_norm": 1.0, "ms": 10.0, "tokens_per_second": 1e4, "mfu": None}
             for step, loss in losses.items()]
    lines += [{"step": step, "val_loss": loss} for step, loss in (evaluations or {}).items()]
    with open(os.path.join(path(name), "log.jsonl"), "w", encoding="utf-8") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines) + extra)
    return path(name)


def compare(*arguments, python=sys.executable):
    process = subprocess.run([python, COMPARE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             timeout=300)
    return process.returncode, process.stdout, process.stderr


def row_of(output, run, key):
    """The cells of the table's row for a run and a key."""
    for line in output.splitlines():
        if line.split()[:2] == [run, key]:
            return line.split()[2:]
    return None


def check_row(output, run, key, expected):
    row = row_of(output, run, key)
    check(row == expected, f"row of {run} {key} is {row}, expected {expected} in\n{output}")


def test_figures():
    with test("differences over common steps only: count, largest, its step, mean"):
        a = write_run("a", {1: 4.0, 2: 3.0, 3: 2.0, 4: 1.0}, {0: 5.0, 4: 1.5})
        b = write_run("b", {2: 3.5, 3: 1.75, 4: 1.0, 5: 9.0}, {4: 1.5})
        status, output, errors = compare(a, b)
        check(status == 0, "status", status, errors)
        check_row(output, "b", "loss", ["3", "5.000e-01", "2", "2.500e-01"])
        check_row(output, "b", "val_loss", ["1", "0.000e+00", "4", "0.000e+00"])
        check_row(output, "b", "grad_norm", ["3", "0.000e+00", "2", "0.000e+00"])
    with test("every run is compared with the first, a log.jsonl counts as a run"):
        c = os.path.join(write_run("c", {1: 4.5}), "log.jsonl")
        status, output, _ = compare(a, b, c)
        check(status == 0, "status", status)
        check_row(output, "b", "loss", ["3", "5.000e-01", "2", "2.500e-01"])
        check_row(output, "c/log.jsonl", "loss", ["1", "5.000e-01", "1", "5.000e-01"])
    with test("a step that comes twice counts as the later line says"):
        again = write_run("again", {1: 4.0, 2: 7.0}, extra=json.dumps({"step": 2, "loss": 3.0}) + "\n")
        status, output, _ = compare(a, again)
        check_row(output, "again", "loss", ["2", "0.000e+00", "1", "0.000e+00"])
    with test("samples and unknown numbers in a log do not disturb"):
        other = write_run("other", {1: 4.0}, extra='{"step": 1, "sample": "text", "temperature": 0.5}\n\n')
        status, output, errors = compare(a, other)
        check(status == 0, "status", status, errors)
        check_row(output, "other", "loss", ["1", "0.000e+00", "1", "0.000e+00"])


def test_limits():
    a = write_run("a", {1: 4.0, 2: 3.0}, {2: 1.0})
    b = write_run("b", {1: 4.0, 2: 3.001}, {2: 2.0})
    with test("--max-difference decides the exit status and names the step"):
        check(compare(a, b, "--max-difference", "0.002")[0] == 0, "0.001 is not above 0.002")
        status, _, errors = compare(a, b, "--max-difference", "0.0005")
        check(status == 1, "status", status)
        check("step 2" in errors and "0.0005" in errors, errors)
        check(compare(a, a, "--max-difference", "0")[0] == 0, "a run differs from itself")
    with test("--key says which difference counts"):
        check(compare(a, b, "--max-difference", "0.5", "--key", "val_loss")[0] == 1, "1.0 passed 0.5")
        check(compare(a, b, "--max-difference", "0.5", "--key", "lr")[0] == 0, "equal lr failed")
    with test("a NaN is above every limit"):
        nan = write_run("nan", {1: 4.0, 2: math.nan})
        status, output, errors = compare(a, nan, "--max-difference", "1e9")
        check(status == 1, "status", status, errors)
        check_row(output, "nan", "loss", ["2", "nan", "2", "nan"])
    with test("no step in common is a failure"):
        late = write_run("late", {7: 4.0})
        status, _, errors = compare(a, late)
        check(status == 1 and "common" in errors, status, errors)


def test_output():
    a, b = write_run("out_a", {1: 4.0}), write_run("out_b", {1: 4.5})
    with test("stdout that nobody reads ends it quietly, a full disk with a sentence, and neither in success"):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run([sys.executable, COMPARE, a, b], stdout=writer, stderr=subprocess.PIPE, text=True)
        os.close(writer)
        check(done.returncode == 141 and not done.stderr, done.returncode, done.stderr)
        if os.path.exists("/dev/full"):
            with open("/dev/full", "w", encoding="utf-8") as full:
                done = subprocess.run([sys.executable, COMPARE, a, b], stdout=full, stderr=subprocess.PIPE, text=True)
            check(done.returncode == 2 and done.stderr == "compare.py: standard output cannot be written: No space left on "
                  "device\n", done.returncode, done.stderr)


def test_bad_input():
    a = write_run("a", {1: 4.0})
    for name, extra, words in (("cut", '{"step": 2, "lo\n', ":2: not JSON"), ("list", "[1, 2]\n", ":2: is list"),
                               ("stepless", '{"loss": 1}\n', ":2: step is null"), ("half", '{"step": 1.5}\n', "1.5"),
                               ("flag", '{"step": 2, "loss": true}\n', ":2: loss is true"),
                               ("deep", "[" * 100000 + "\n", ":2: not JSON"),
                               ("huge", '{"step": 1' + "0" * 500 + "}\n", ":2: step")):
        with test(f"a bad line is named by file and number: {name}"):
            bad = write_run("bad_" + name, {1: 4.0}, extra=extra)
            status, _, errors = compare(a, bad)
            check(status == 2, "status", status, errors[-300:])
            check("log.jsonl" + words in errors or ("log.jsonl:2" in errors and words in errors), errors[-300:])
            check("Traceback" not in errors, errors[-300:])
    with test("a last line that is cut off is left out, with a note"):
        status, output, errors = compare(a, write_run("killed", {1: 4.0}, extra='{"step": 2, "loss": 3.'))
        check(status == 0, "status", status, errors)
        check("log.jsonl:2: " in errors and "cut off" in errors and errors.count("\n") == 1, errors)
        check_row(output, "killed", "loss", ["1", "0.000e+00", "1", "0.000e+00"])
    with test("a missing run, an empty one and an unknown key are sentences"):
        empty = write_run("empty", {})
        for arguments, words in (((path("nowhere"), a), "No such file"), ((a, empty), "no step"),
                                 ((a, a, "--key", "speed"), "has no speed"),
                                 ((a, a, "--html", path("no/page.html")), "no/page.html: No such file")):
            status, _, errors = compare(*arguments)
            check(status == 2 and words in errors and "Traceback" not in errors, status, errors)


def test_no_files():
    a = write_run("a", {1: 4.0})
    for name, make in (("FIFO", os.mkfifo), ("directory", os.mkdir)):
        with test(f"a {name} in place of a log or a config.json is a sentence, and nothing is waited for"):
            odd = path("odd_" + name)
            os.makedirs(odd)
            make(os.path.join(odd, "log.jsonl"))
            options = write_run("options_" + name, {1: 4.0})
            make(os.path.join(options, "config.json"))
            for run, file in ((odd, "log.jsonl"), (options, "config.json")):
                status, _, errors = compare(a, run, "--html", path("odd.html"))
                check(status == 2 and errors == f"compare.py: {run}/{file}: is not a regular file\n", status, errors)
    with test("a FIFO or a device that is itself given as a log is a sentence"):
        fifo = path("fifo")
        os.mkfifo(fifo)
        status, _, errors = compare(a, fifo)
        check(status == 2 and errors == f"compare.py: {fifo}: is not a regular file\n", status, errors)
        status, _, errors = compare(a, "/dev/null")
        check(status == 2 and errors == "compare.py: /dev/null: is not a regular file\n", status, errors)


def test_targets():
    a = write_run("a", {1: 4.0})
    log, page = os.path.join(a, "log.jsonl"), path("input.html")
    with open(log, encoding="utf-8") as file:
        text = file.read()
    with open(page, "w", encoding="utf-8") as file:
        file.write(text)
    os.symlink(log, path("link.html"))
    with test("neither a run's log nor an input nor what is no file is written over"):
        for option, target, words in (("--html", log, "no .html file"), ("--png", log, "no .png file"),
                                      ("--html", path("link.html"), "no .html file"), ("--html", page, "no .html file"),
                                      ("--html", a, "not a regular file"), ("--png", "/dev/null", "not a regular file")):
            status, output, errors = compare(a, page, option, target)
            check(status == 2 and errors.startswith(f"compare.py: {target}: ") and words in errors, status, errors)
            check(errors.count("\n") == 1 and not output, output, errors)
        for name in (log, page):
            with open(name, encoding="utf-8") as file:
                check(file.read() == text, name, "is another")
    with test("a page is written over an earlier one"):
        for _ in range(2):
            status, output, errors = compare(a, a, "--html", path("again.html"))
            check(status == 0 and "wrote" in output, status, output, errors)
    with test("a --max-difference that is no limit is refused"):
        for limit in ("-1", "nan", "much"):
            status, output, errors = compare(a, a, "--max-difference", limit)
            check(status == 2 and f"--max-difference: got '{limit}', expected" in errors and not output, status, errors)


def python_with_matplotlib():
    for python in (sys.executable, "/usr/bin/python3"):
        command = [python, "-c", "import matplotlib"]
        if os.path.exists(python) and subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0:
            return python
    return None


def test_picture():
    python = python_with_matplotlib()
    cases = {"short": ({1: 4.0, 2: 3.0}, {1: 4.0, 2: 3.1}), "equal": ({1: 4.0}, {1: 4.0}), "apart": ({1: 4.0}, {2: 4.0}),
             "long": ({s: 5 / s for s in range(1, 20001)}, {s: 5 / s + 1e-6 * (s % 7) for s in range(1, 20001)}),
             "broken": ({1: 4.0, 2: math.nan, 3: 2.0}, {1: 4.0, 2: 3.0, 3: math.inf})}
    for name, (left, right) in cases.items():
        with test(f"the picture of {name} runs"):
            if not python:
                skip("no Python with matplotlib")
            png = path(name + ".png")
            runs = write_run("left", left, {1: 4.0}), write_run("right", right)
            _, output, errors = compare(*runs, "--png", png, python=python)
            check("drew" in output and "Traceback" not in errors and "Warning" not in errors, output, errors)
            with open(png, "rb") as file:
                check(file.read(8) == b"\x89PNG\r\n\x1a\n", "not a PNG")
    with test("the picture of one run alone"):
        if not python:
            skip("no Python with matplotlib")
        status, output, errors = compare(write_run("left", {1: 4.0, 2: 3.0}), "--png", path("one.png"), python=python)
        check(status == 0 and "drew" in output, status, output, errors)
    with test("a picture that cannot be written is a sentence"):
        if not python:
            skip("no Python with matplotlib")
        status, _, errors = compare(write_run("left", {1: 4.0}), "--png", path("nowhere/x.png"), python=python)
        check(status == 2 and "Traceback" not in errors, status, errors)
    with test("without matplotlib numbers and page come all the same, and a sentence"):
        block = path("block")
        os.makedirs(os.path.join(block, "matplotlib"), exist_ok=True)
        with open(os.path.join(block, "matplotlib", "__init__.py"), "w", encoding="utf-8") as file:
            file.write("raise ImportError('blocked')\n")
        run = write_run("left", {1: 4.0})
        page = path("without.html")
        process = subprocess.run([sys.executable, COMPARE, run, run, "--png", path("no.png"), "--html", page],
                                 capture_output=True, text=True, env={**os.environ, "PYTHONPATH": block})
        sentence = f"compare.py: {path('no.png')} is not drawn: matplotlib is not installed for {sys.executable}\n"
        check(process.returncode == 2 and process.stderr == sentence, process.returncode, process.stderr)
        check("0.000e+00" in process.stdout and os.path.exists(page), process.stdout)
        check(not os.path.exists(path("no.png")), "it drew")


test_figures()
test_limits()
test_output()
test_bad_input()
test_no_files()
test_targets()
test_picture()
end()
