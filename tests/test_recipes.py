#!/usr/bin/env python3
"""dev/recipes: each command prepares what is missing with arguments that the programs take, trains, and goes on with its run
when it is given again; README.md has every recipe, and whether it was run.

Python is a stand-in here that writes its arguments down and makes a small corpus, or brings a small model, in place of the
real ones; the options at the end make the models small."""
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "tests"), os.path.join(ROOT, "data")]
import prepare  # noqa: E402
import sources  # noqa: E402
from check import check, end, test  # noqa: E402
from trainer_runs import TRAIN, read_log  # noqa: E402

TMP = tempfile.mkdtemp(prefix="flashgpt-recipes-")
RECIPES = sorted(glob.glob(os.path.join(ROOT, "dev", "recipes", "*.sh")))
STAND_IN = f"""#!{sys.executable}
import json, os, shutil, subprocess, sys
sys.path.insert(0, {os.path.join(ROOT, "tests")!r})
from trainer_runs import write_corpus
with open({os.path.join(TMP, "calls")!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "data/download.py" and "hellaswag" in sys.argv[-1]:
    os.makedirs(sys.argv[3])
elif sys.argv[1] == "dev/hellaswag.py":
    small = ["--made-up", "5", "--vocab", "50", "--longest", "8", "--out", sys.argv[sys.argv.index("--out") + 1]]
    sys.exit(subprocess.call([sys.executable, {os.path.join(ROOT, "dev", "hellaswag.py")!r}, *small]))
elif sys.argv[1] == "data/download.py":
    shutil.copytree({os.path.join(ROOT, "tests", "fixtures", "huggingface", "plain")!r}, sys.argv[3])
else:
    out = sys.argv[sys.argv.index("--out") + 1]
    write_corpus(out, vocab=50)
    os.unlink(os.path.join(out, "tokenizer.bin"))
    open(os.path.join(out, "corpus.json"), "w").close()
"""
SMALL = "--seq 8 --batch 2 --batch-tokens 16 --steps 3 --warmup 0 --eval-tokens 64 --sample-every 0 --dtype fp32 " \
        "--device cpu"
SHAPE = "--layers 1 --heads 1 --dim 8 --context 8 --vocab 50"


def cook(recipe, folder, *options):
    """(status, output, errors) of a recipe whose directories lie in a folder."""
    names = {name: os.path.join(TMP, folder, name.lower()) for name in ("DATA", "OUT", "MODEL")}
    names["HELLASWAG"] = os.path.join(TMP, folder, "questions", "made.bin")
    done = subprocess.run(["sh", os.path.join(ROOT, "dev", "recipes", recipe + ".sh"), *options], capture_output=True,
                          text=True, env={**os.environ, **names, "TRAIN": TRAIN, "PYTHON": os.path.join(TMP, "python")})
    return done.returncode, done.stdout, done.stderr


def calls():
    """The arguments of every call of the stand-in since the last time."""
    path = os.path.join(TMP, "calls")
    if not os.path.exists(path):
        return []
    with open(path) as file:
        found = [json.loads(line) for line in file]
    os.unlink(path)
    return found


def main():
    with open(os.path.join(TMP, "python"), "w") as file:
        file.write(STAND_IN)
    os.chmod(os.path.join(TMP, "python"), 0o755)
    for recipe, name, shape in (("shakespeare", "shakespeare", SHAPE), ("gpt2_fineweb", "fineweb", SHAPE),
                                ("finetune_gpt2", "shakespeare", "")):
        with test(f"{recipe}: prepares what is missing, trains, is stopped and goes on, all by the same command"):
            options = [*SMALL.split(), *shape.split()]
            status, out, err = cook(recipe, recipe, *options, "--stop", "1")
            made = calls()
            check(status == 0 and "stopped at step 1 of 3" in out, out, err)
            wanted = {"shakespeare": ["data/prepare.py"], "finetune_gpt2": ["data/download.py", "data/prepare.py"],
                      "gpt2_fineweb": ["data/prepare.py", "data/download.py", "dev/hellaswag.py"]}[recipe]
            check([call[0] for call in made] == wanted, made)
            args = prepare.parse_arguments(next(call for call in made if call[0] == "data/prepare.py")[1:])
            check(args.dataset == name and args.out == os.path.join(TMP, recipe, "data"), args)
            check(args.tokenizer == (os.path.join(TMP, recipe, "model") if "finetune" in recipe else
                                     sources.SETS[name].tokenizer), args.tokenizer)
            status, out, err = cook(recipe, recipe)
            check(status == 0 and "done at step 3 of 3" in out and calls() == [], out, err)
            run = os.path.join(TMP, recipe, "out")
            check([line["step"] for line in read_log(run) if "loss" in line] == [1, 2, 3], read_log(run))
            check(os.path.exists(os.path.join(run, "report.html")), "no page")
            check(any("hellaswag" in line for line in read_log(run)) == (recipe == "gpt2_fineweb"), "HellaSwag")
    with test("finetune_gpt2: the model comes from Hugging Face, weights last; an own text is prepared instead"):
        shutil.rmtree(os.path.join(TMP, "finetune_gpt2"))
        os.environ["TEXT"] = "book.txt"
        status, out, err = cook("finetune_gpt2", "finetune_gpt2", *SMALL.split())
        del os.environ["TEXT"]
        made = calls()
        check(status == 0 and "start" in out, out, err)
        urls = [word for word in made[0] if word.startswith("https://")]
        names = [url.rpartition("/")[2] for url in urls]
        check(names == ["config.json", "vocab.json", "merges.txt", "model.safetensors"], urls)
        check(made[1][1:3] == ["--text", "book.txt"], made[1])
    with test("a recipe whose data cannot be had ends there"):
        with open(os.path.join(TMP, "python"), "w") as file:
            file.write("#!/bin/sh\necho offline >&2\nexit 1\n")
        for recipe in ("shakespeare", "gpt2_fineweb", "finetune_gpt2"):
            status, out, err = cook(recipe, "none", *SMALL.split())
            check(status == 1 and err == "offline\n" and not out, recipe, status, out, err)
    with test("README.md: every recipe in a row that says whether it was run"):
        with open(os.path.join(ROOT, "dev", "recipes", "README.md"), encoding="utf-8") as file:
            rows = dict(re.findall(r"^\| `sh dev/recipes/(\w+)\.sh` \|.*\| \*\*(yes|no)\*\*.*\|$", file.read(), re.M))
        check(sorted(rows) == [os.path.basename(path)[:-3] for path in RECIPES], rows, RECIPES)
    shutil.rmtree(TMP, ignore_errors=True)
    end()


if __name__ == "__main__":
    main()
