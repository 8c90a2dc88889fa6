#!/usr/bin/env python3
"""dev/run.py (make run): whose corpora it uses again, which it replaces, which it leaves alone. Its trainer here is `true`.
"""
import json
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path.insert(0, HERE)
from check import check, end, test  # noqa: E402

FOLDER = tempfile.TemporaryDirectory()
RUNS = os.path.join(FOLDER.name, "runs")
AGAIN = "holds the corpus already"


def path(*names):
    return os.path.join(FOLDER.name, *names)


def write(name, text):
    os.makedirs(os.path.dirname(path(name)), exist_ok=True)
    with open(path(name), "w") as file:
        file.write(text)
    return path(name)


def run(*options):
    """Exit status, output and errors of dev/run.py."""
    done = subprocess.run([sys.executable, os.path.join(ROOT, "dev", "run.py"), "--train", "true", "--runs", RUNS, *options],
                          cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def corpora():
    """Folder -> path of its text, of every corpus."""
    found = {}
    for name in sorted(os.listdir(RUNS)):
        with open(os.path.join(RUNS, name, "corpus.json")) as file:
            found[name] = json.load(file)["sources"][0]["path"]
    return found


def prepare(folder, *options):
    """A corpus that somebody made by hand."""
    script = os.path.join(ROOT, "data", "prepare.py")
    done = subprocess.run([sys.executable, script, "--out", os.path.join(RUNS, folder), *options], capture_output=True,
                          text=True)
    check(done.returncode == 0, done.stderr)


def change(folder, **values):
    """Other values in a corpus.json."""
    name = os.path.join(RUNS, folder, "corpus.json")
    with open(name) as file:
        corpus = json.load(file)
    with open(name, "w") as file:
        json.dump({**corpus, **values}, file)


def main():
    one, other = write("a/book.txt", "one text " * 100), write("b/book.txt", "another text " * 100)
    with test("two texts of one name have a corpus each, made once"):
        for text in (one, other):
            status, output, errors = run("--text", text)
            check(status == 0 and AGAIN not in output, status, output, errors)
        found = corpora()
        check(sorted(found.values()) == [one, other], found)
        check(all(name.startswith("book-") for name in found), found)
        check(AGAIN in run("--text", os.path.relpath(one, ROOT))[1], "a relative path is taken for another text")
    folder = [name for name, text in found.items() if text == one][0]
    with test("a text that changed is prepared again"):
        write("a/book.txt", "one text, longer " * 100)
        status, output, errors = run("--text", one)
        check(status == 0 and AGAIN not in output, status, output, errors)
        check(AGAIN in run("--text", one)[1], "and then again")
    with test("a corpus of another tokenizer is not taken for the bytes"):
        change(folder, tokenizer="gpt2")
        status, output, errors = run("--text", one)
        check(status == 0 and AGAIN not in output, status, output, errors)
    with test("a corpus that was made by hand stays as it is"):
        os.unlink(os.path.join(RUNS, folder, ".made_by_run"))
        change(folder, note="mine")
        for options, name in ((["--text", one], folder), ([], "builtin")):
            if not options:
                prepare(name, "--text", other)
            before = open(os.path.join(RUNS, name, "corpus.json")).read()
            status, _, errors = run(*options)
            check(status == 1 and name in errors and errors.count("\n") == 1, status, errors)
            check(open(os.path.join(RUNS, name, "corpus.json")).read() == before, f"{name} was replaced")
    with test("a text that is not there is one sentence, and leaves nothing"):
        status, _, errors = run("--text", path("nowhere"))
        check(status == 1 and "nowhere" in errors and errors.count("\n") == 1, status, errors)
        check(not [name for name in os.listdir(RUNS) if "nowhere" in name], os.listdir(RUNS))
    FOLDER.cleanup()
    end()


if __name__ == "__main__":
    main()
