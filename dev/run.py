#!/usr/bin/env python3
"""A first run, in about a minute: `make run` or `make run TEXT=FILE`.

Calls two programs with options, and shows the commands so that they can be repeated and changed by hand:
    data/prepare.py    text to shards: runs/NAME, used again by the next run while the text is the same
    ./train_gpt        trains on them, in a new runs/NAME-1, runs/NAME-2, ...; prints the loss curve and a sample

NAME is that of the text with a few digits that stand for its full path, so that no two texts share a directory. A directory
of that name that was not made here is left alone.

Without TEXT the corpus is made here, from a random grammar whose entropy is known (data/grammar.py): the trainer shows
beside its validation loss what the best possible model would reach, which says more than a loss that just falls.
"""
import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "data"))
from grammar import Grammar  # noqa: E402

MARKER = ".made_by_run"  # in a directory whose corpus may be replaced: nobody else made it

MODEL = "--layers 4 --heads 4 --dim 128"
# A window begins somewhere within a sentence, and until the next one begins the model pays for not knowing where. In short
# windows that is more of the loss; in long ones, positions take longer to learn.
BUILTIN = f"{MODEL} --seq 256 --batch 4 --steps 3500 --lr 3e-3 --lr-final 3e-4 --warmup 100 --beta2 0.99 " \
          "--eval-every 500 --eval-tokens 131072 --print-every 100 --save-every 3500 --sample-every 3500 " \
          "--sample-tokens 400 --temperature 1 --prompt My"
# The size of nanoGPT's example on characters of Shakespeare, with twice its learning rate.
TEXT = f"{MODEL} --seq 64 --batch 12 --steps 2000 --lr 2e-3 --lr-final 1e-4 --warmup 100 --beta2 0.99 --weight-decay 0.1 " \
       "--eval-every 250 --eval-tokens 111539 --print-every 100 --save-every 2000 --sample-every 2000 --sample-tokens 400"


def run(command):
    """Shows a command, runs it, ends this program where it fails. Ctrl-C is the command's to answer."""
    shown = ["python3" if word == sys.executable else word for word in command]
    print("\n$ " + " ".join(map(shlex.quote, shown)), flush=True)
    process = subprocess.Popen(command)
    while True:
        try:
            status = process.wait()
            break
        except KeyboardInterrupt:
            continue
    if status:
        sys.exit(status if status > 0 else 128 - status)


def directory_name(text):
    """That of a text's corpus: readable, and another one for every path."""
    if text is None:
        return "builtin"
    name = re.sub(r"[^A-Za-z0-9._-]", "_", os.path.splitext(os.path.basename(text))[0])
    return f"{name}-{hashlib.sha256(os.fsencode(text)).hexdigest()[:8]}"


def is_corpus_of(directory, text):
    """Whether a directory holds the whole corpus of this text as bytes, or of the builtin grammar as it is now."""
    try:
        with open(os.path.join(directory, "corpus.json"), encoding="utf-8") as file:
            corpus = json.load(file)
        source, = corpus["sources"]
        if corpus["tokenizer"] != "bytes":
            return False
        if text is None:
            return source["path"] == "builtin" and corpus["entropy_rate"] == Grammar(source["seed"]).entropy_rate()
        status = os.stat(text)
        return (source["path"], source["bytes"], source["modified"]) == (text, status.st_size, int(status.st_mtime))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def prepare(directory, text):
    """Makes the corpus, unless it is there already. Replaces only one that was made here."""
    marker = os.path.join(directory, MARKER)
    if os.path.exists(directory) and not os.path.exists(marker):
        sys.exit(f"run.py: {directory} was not made by this program and is left alone; move it, or name another place "
                 "with --runs DIR")
    if is_corpus_of(directory, text):
        print(f"{directory} holds the corpus already")
        return
    os.makedirs(directory, exist_ok=True)
    with open(marker, "w", encoding="utf-8"):
        pass
    run([sys.executable, os.path.relpath(os.path.join(ROOT, "data", "prepare.py")), "--text", text or "builtin",
         "--tokenizer", "bytes", "--out", directory, "--force"])


def new_directory(base):
    """base-1, base-2, ...: the first that is not there. The trainer makes it."""
    number = 1
    while os.path.exists(f"{base}-{number}"):
        number += 1
    return f"{base}-{number}"


def main():
    parser = argparse.ArgumentParser(description="Prepares a corpus and trains on it for about a minute.")
    parser.add_argument("--train", default="./train_gpt", metavar="PROGRAM", help="the trainer (default: ./train_gpt)")
    parser.add_argument("--text", metavar="FILE", help="text to train on, as bytes (default: a corpus made here)")
    parser.add_argument("--runs", default="runs", metavar="DIR", help="where corpora and runs go (default: runs)")
    args = parser.parse_args()
    text = os.path.abspath(args.text) if args.text else None
    if text and not os.path.isfile(text):
        sys.exit(f"run.py: --text {args.text}: is no file")
    corpus = os.path.join(args.runs, directory_name(text))
    prepare(corpus, text)
    run([args.train, "--data", corpus, *shlex.split(TEXT if text else BUILTIN), "--out", new_directory(corpus)])


if __name__ == "__main__":
    main()
