#!/usr/bin/env python3
"""train_gpt evaluate, and dev/hellaswag.py beside it: the loss of whole validation sets is PyTorch's and the trainer's,
every token counted once; the choices among endings are PyTorch's, alone and while it trains; what is faulty gets one
sentence."""
import json
import math
import os
import random
import re
import resource
import shutil
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "dev"))
from check import check, end, skip, test  # noqa: E402
from hellaswag import make_questions, pack_example, pack_file  # noqa: E402
from trainer_runs import ROOT, TINY, TRAIN, read_log, train, write_corpus, write_shard  # noqa: E402

FIXTURES = os.path.join(ROOT, "tests", "fixtures", "huggingface")
CONTEXT, VOCAB = 20, 150  # of the fixture "sharded"
TMP = tempfile.mkdtemp(prefix="flashgpt-evaluate-")

# Largest difference of a mean loss from PyTorch's in float64, relative: fp32 sums of some hundred terms.
LOSS_BOUND = 2e-6


def path(*parts):
    return os.path.join(TMP, *parts)


def evaluate(*options):
    return train("evaluate", *options)


def model_folder():
    """The fixture as a directory of ours, in fp32."""
    if not os.path.isdir(path("model")):
        status, _, err = train("export", "--to", "hf", os.path.join(FIXTURES, "sharded"), path("model"))
        check(status == 0, err)
    return path("model")


class Twin:
    """dev/reference.py's GPT with the fixture's weights, in float64."""

    def __init__(self):
        try:
            import torch
            import reference
            reference.need_torch()
        except (ImportError, SystemExit) as error:
            skip(f"needs PyTorch and numpy: {error}")
        with open(os.path.join(model_folder(), "config.json")) as file:
            config = json.load(file)
        self.torch = torch
        self.model = reference.Gpt(config["n_layer"], config["n_head"], config["n_embd"], config["n_positions"],
                                   config["vocab_size"])
        reference.load_parameters(self.model, model_folder())
        self.model.double().eval()

    def losses(self, tokens):
        """The loss of each token but the first, given those before it."""
        torch = self.torch
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens[:-1]]))[0]
            return torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none").tolist()


def numbers(text):
    """(tokens predicted, loss, bits, perplexity) that evaluate printed."""
    found = re.search(r"^val +(\d+) tokens predicted.*\nloss +([\d.]+) nats a token, ([\d.]+) bits a token, perplexity "
                      r"([\d.]+)$", text, re.M)
    return (int(found[1]), *map(float, found.groups()[1:])) if found else (0, 0.0, 0.0, 0.0)


def scores(text):
    """(examples, right by the loss a token, right by the loss in all) that evaluate printed."""
    found = re.search(r"^hellaswag (\d+) examples: acc_norm ([\d.]+) \((\d+) right by the loss a token\), acc ([\d.]+) "
                      r"\((\d+) by the loss in all\)$", text, re.M)
    if not check(found, "no score in:", text):
        return 0, 0, 0
    examples, by_mean, by_sum = int(found[1]), int(found[3]), int(found[5])
    check(abs(float(found[2]) - by_mean / examples) < 6e-5 and abs(float(found[4]) - by_sum / examples) < 6e-5, found[0])
    return examples, by_mean, by_sum


# --- validation ---------------------------------------------------------------------------------------------------------

def test_validation():
    rng = random.Random(5)
    # Shards with something left behind their windows and without, shorter than a window, and of two tokens.
    sizes = (3 * 12 + 1, 5 * 12 + 8, 7, 2, 13, 40)
    shards = [[rng.randrange(VOCAB) for _ in range(size)] for size in sizes]
    os.makedirs(path("val"))
    for number, tokens in enumerate(shards):
        write_shard(path("val", f"val_{number}.bin"), tokens)
    glob = path("val", "val_*.bin")
    with test("the loss of a whole set is PyTorch's, each token but a shard's first counted once"):
        twin, whole = Twin(), []
        for tokens in shards:
            for first in range(0, len(tokens) - 1, 12):
                whole += twin.losses(tokens[first:first + 13])
        wanted = sum(whole) / len(whole)
        for batch in (1, 3, 8, 64):
            status, out, err = evaluate("--init", model_folder(), "--val", glob, "--seq", 12, "--batch", batch)
            count, loss, bits, perplexity = numbers(out)
            check(status == 0 and count == len(whole) == sum(sizes) - len(sizes), count, len(whole), err)
            check(abs(loss - wanted) <= LOSS_BOUND * wanted, f"batch {batch}: {loss}, PyTorch {wanted}")
            check(abs(bits - wanted / math.log(2)) < 1e-5, bits)
            check(abs(perplexity / math.exp(wanted) - 1) < 1e-4, perplexity)
    with test("without --seq, windows are as long as the context"):
        _, out, _ = evaluate("--init", model_folder(), "--val", glob)
        _, longest, _ = evaluate("--init", model_folder(), "--val", glob, "--seq", CONTEXT)
        check(numbers(out)[1] == numbers(longest)[1] != 0 and f"up to {CONTEXT} before" in out, out, longest)


def test_trainer_agrees():
    with test("the loss is the trainer's, to the last digit, on the same windows"):
        corpus, out = write_corpus(path("corpus")), path("run")
        rng = random.Random(8)
        write_shard(os.path.join(corpus, "val_0.bin"), [rng.randrange(97) for _ in range(16 * 21 + 1)])
        write_shard(os.path.join(corpus, "val_1.bin"), [rng.randrange(97) for _ in range(16 * 6 + 1)])
        status, _, err = train(*TINY, "--data", corpus, "--steps", 3, "--eval-every", 1, "--eval-tokens", 10 ** 6,
                               "--save-every", 1, "--keep", 0, "--out", out)
        check(status == 0, err)
        losses = {line["step"]: line["val_loss"] for line in read_log(out) if "val_loss" in line}
        check(sorted(losses) == [0, 1, 2, 3], losses)
        for step in (1, 3):
            status, text, err = evaluate("--init", os.path.join(out, f"step_{step:08}"), "--data", corpus, "--batch", 4)
            check(status == 0 and numbers(text)[:2] == (16 * 27, round(losses[step], 9)), losses[step], text, err)
        status, text, _ = evaluate("--init", out, "--data", corpus, "--batch", 4)
        check(numbers(text)[1] == round(losses[3], 9), "a run's directory is not its newest checkpoint:", text)


# --- endings ------------------------------------------------------------------------------------------------------------

def questions():
    """200 questions, some of whose rows are as long as the model can take: all its context and one token more."""
    made = list(make_questions(198, VOCAB, CONTEXT + 1, 3))
    rng = random.Random(4)
    long = [[rng.randrange(VOCAB) for _ in range(CONTEXT)], [[rng.randrange(VOCAB)] for _ in range(4)], 2]
    wide = [[rng.randrange(VOCAB)], [[rng.randrange(VOCAB) for _ in range(CONTEXT)] for _ in range(4)], 1]
    return [*made, long, wide]


def write_questions(name, made, labels=None):
    """A file of questions, with other labels where they are given."""
    examples = [pack_example(number, context, endings, labels[number] if labels else label)
                for number, (context, endings, label) in enumerate(made)]
    with open(path(name), "wb") as file:
        file.write(pack_file(examples))
    return path(name)


def test_choices():
    made = questions()
    with test("200 questions: the scores are PyTorch's, for every batch, and so is each single choice"):
        twin, by_mean, by_sum = Twin(), [], []
        for context, endings, _ in made:
            losses = [twin.losses(context + ending)[len(context) - 1:] for ending in endings]
            sums = [sum(loss) for loss in losses]
            means = [sum(loss) / len(loss) for loss in losses]
            by_mean.append(means.index(min(means)))
            by_sum.append(sums.index(min(sums)))
        same = sum(a == b for a, b in zip(by_mean, by_sum))
        check(20 < same < 180 and len(set(by_mean)) == 4, "the two choices are nearly the same or opposite:", same)
        labels = [label for _, _, label in made]
        wanted = (200, sum(a == b for a, b in zip(by_mean, labels)), sum(a == b for a, b in zip(by_sum, labels)))
        file = write_questions("random.bin", made)
        for batch in (1, 7, 8, 1000):
            status, out, err = evaluate("--init", model_folder(), "--hellaswag", file, "--batch", batch)
            check(status == 0 and scores(out) == wanted, f"batch {batch}: {out}, PyTorch {wanted}", err)
        # With PyTorch's own choices for labels, one choice that differs shows.
        for name, choice, expected in (("mean.bin", by_mean, (200, 200, same)), ("sum.bin", by_sum, (200, same, 200))):
            _, out, _ = evaluate("--init", model_folder(), "--hellaswag", write_questions(name, made, choice))
            check(scores(out) == expected, f"{name}: {out}, expected {expected}")
    with test("questions with two and with seven endings"):
        rng = random.Random(9)
        mixed = [([rng.randrange(VOCAB)], [[rng.randrange(VOCAB) for _ in range(3)] for _ in range(count)], count - 1)
                 for count in (2, 7, 2, 4, 7)]
        file = write_questions("mixed.bin", mixed)
        status, out, err = evaluate("--init", model_folder(), "--hellaswag", file, "--batch", 5)
        check(status == 0 and scores(out)[0] == 5, out, err)
    with test("of endings that are alike, the first counts"):
        alike = [([1, 2], [[5, 6]] * 4, label) for label in (0, 0, 3)]
        _, out, _ = evaluate("--init", model_folder(), "--hellaswag", write_questions("alike.bin", alike), "--batch", 3)
        check(scores(out) == (3, 2, 2), out)


def test_training():
    with test("the trainer asks the questions when they are due, and at the end, with the same result"):
        corpus, out = write_corpus(path("asked")), path("asked_run")
        file = write_questions("asked.bin", list(make_questions(60, 97, 17, 6)))
        options = [*TINY, "--data", corpus, "--lr", "1e-2", "--eval-every", 0]
        status, text, err = train(*options, "--steps", 5, "--hellaswag", file, "--hellaswag-every", 2, "--save-every", 1,
                                  "--keep", 0, "--out", out)
        check(status == 0, err)
        log = {line["step"]: line for line in read_log(out) if "hellaswag" in line}
        check(sorted(log) == [2, 4, 5], log)
        for step, line in log.items():
            _, said, _ = evaluate("--init", os.path.join(out, f"step_{step:08}"), "--hellaswag", file)
            examples, by_mean, _ = scores(said)
            check(line["hellaswag"] == by_mean / 60 and line["hellaswag_examples"] == examples == 60, line, said)
            check(f"step {step:6}/5  hellaswag {by_mean / 60:.4f}: {by_mean} of 60\n" in text, text)
    with test("questions change nothing of the training, and 0 asks none"):
        losses = {}
        for name, more in (("with", ("--hellaswag", file, "--hellaswag-every", 1)),
                           ("none", ("--hellaswag", file, "--hellaswag-every", 0)), ("without", ())):
            status, _, err = train(*options, "--steps", 3, *more, "--out", path(name))
            check(status == 0, err)
            losses[name] = [line["loss"] for line in read_log(path(name)) if "loss" in line]
        check(losses["with"] == losses["without"] == losses["none"] and len(losses["with"]) == 3, losses)
        check(not any("hellaswag" in line for line in read_log(path("none"))), "0 asked")


# --- what cannot be read ------------------------------------------------------------------------------------------------

def refused(status, words, *options, command=evaluate):
    got, out, err = command(*options)
    check(got == status, f"status {got}, expected {status}:", out, err)
    lines = err.strip().split("\n")
    check(len(lines) == 1 and lines[0].startswith("train_gpt: "), "expected one sentence on stderr, got:", err)
    for word in words:
        check(str(word) in err, f"'{word}' is missing in:", err)


def test_faulty_files():
    good = pack_file([pack_example(number, *question) for number, question in enumerate(make_questions(5, VOCAB, 12, 2))])
    second = 1024 + struct.unpack_from("<H", good, 1026)[0]  # where example 1 begins

    def patched(*words):
        """The good file with uint16 words (place, value) changed."""
        data = bytearray(good)
        for at, value in words:
            struct.pack_into("<H", data, at, value)
        return bytes(data)

    def header(*words):
        data = bytearray(good)
        for index, value in words:
            struct.pack_into("<i", data, 4 * index, value)
        return bytes(data)

    context = struct.unpack_from("<H", good, second + 10)[0]
    cases = [
        ("an empty file", b"", ["0 bytes", "header of 1024"]),
        ("half a header", good[:600], ["600 bytes", "header of 1024"]),
        ("another magic", header((0, 20240520)), ["20240520", "expected 20240522"]),
        ("another version", header((1, 2)), ["version 2", "expected 1"]),
        ("no examples", header((2, 0)), ["counts 0 examples"]),
        ("a negative count", header((2, -1)), ["counts 4294967295 examples"]),
        ("a file without its last byte", good[:-1], ["even number", "cut short"]),
        ("a file without its last token", good[:-2], ["example 4", "cut short"]),
        ("a file that ends within an example's beginning", good[:second + 6], ["example 1", "6 bytes into it", "cut short"]),
        ("more examples than there are", header((2, 6)), ["example 5", "0 bytes into it", "cut short"]),
        ("fewer examples than there are", header((2, 4)), ["behind its 4 examples"]),
        ("bytes behind the last example", good + b"\0\0", ["2 bytes", "behind its 5 examples"]),
        ("an example that begins otherwise", patched((second, 7)), ["example 1", f"at byte {second}", "begins with 7"]),
        ("an odd size", patched((second + 2, 33)), ["example 1", "33 bytes", "even"]),
        ("a size of nothing", patched((second + 2, 0)), ["example 1", "0 bytes"]),
        ("a size too large", patched((second + 2, 65534)), ["example 1", "65534 bytes", "cut short"]),
        ("an example longer than the header says", header((3, 20)), ["example 0", "header says the longest has 20"]),
        ("another number", patched((second + 4, 9)), ["example 1", "number 9"]),
        ("a label beyond the endings", patched((second + 6, 4)), ["example 1", "number 4 of 4"]),
        ("one ending", patched((second + 8, 1), (second + 6, 0)), ["example 1", "1 endings", "at least 2"]),
        ("an ending less than it says", patched((second + 8, 5)), ["example 1", "ends before its ending"]),
        ("an ending more than it says", patched((second + 8, 3), (second + 6, 0)), ["example 1", "behind its endings"]),
        ("an empty context", patched((second + 10, 0)), ["example 1", "context is empty"]),
        ("an empty ending", patched((second + 12 + 2 * context, 0)), ["example 1", "ending is empty"]),
        ("a context beyond the example", patched((second + 10, 6000)), ["example 1", "6000 tokens"]),
        ("a token beyond the vocabulary", patched((second + 12, VOCAB)),
         ["example 1", f"at byte {second + 12}", f"token {VOCAB}", f"has {VOCAB}"]),
    ]
    for name, data, words in cases:
        with test("refuses " + name):
            with open(path("faulty.bin"), "wb") as file:
                file.write(data)
            refused(1, ["faulty.bin", *words], "--init", model_folder(), "--hellaswag", path("faulty.bin"))
    with test("an example longer than the context, or than --seq, is refused with both lengths"):
        long = write_questions("long.bin", [([1] * 15, [[2] * 7, [3]], 0)])
        fits = write_questions("fits.bin", [([1] * 15, [[2] * 6, [3]], 0)])
        options = ["--init", model_folder(), "--hellaswag"]
        refused(1, ["long.bin", "example 0", "ending 0 have 22 tokens", "sees 20"], *options, long)
        status, _, err = evaluate(*options, fits)
        check(status == 0, err)
        refused(1, ["have 21 tokens", "sees 19"], *options, fits, "--seq", 19)
        refused(1, ["have 21 tokens", "sees 16"], *TINY, "--data", write_corpus(path("short")), "--steps", 1, "--hellaswag",
                fits, "--out", path("never"), command=train)
        check(not os.path.exists(path("never", "log.jsonl")), "a run was begun")
    with test("a file that is not there, and one that is a directory"):
        refused(1, ["none.bin", "No such file"], "--init", model_folder(), "--hellaswag", path("none.bin"))
        refused(1, [TMP, "no regular file"], "--init", model_folder(), "--hellaswag", TMP)
    with test("a FIFO without a writer is not waited for"):
        os.mkfifo(path("fifo"))
        done = subprocess.run(["timeout", "-s", "KILL", "20", TRAIN, "evaluate", "--init", model_folder(), "--hellaswag",
                               path("fifo")], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        check(done.returncode == 1 and "fifo: is no regular file" in done.stderr, done.returncode, done.stderr)


def test_refusals():
    model = model_folder()
    write_shard(path("high.bin"), [1, 2, 3, VOCAB, 5])
    cases = [
        ("no model", 2, ["evaluate: --init is missing"], []),
        ("nothing to evaluate on", 2, ["evaluate: nothing to evaluate on"], ["--init", model]),
        ("an unknown option, with the nearest", 2, ["evaluate: unknown option '--helaswag'", "--hellaswag"],
         ["--init", model, "--helaswag", "x"]),
        ("a word that belongs to no option", 2, ["evaluate: 'word'"], ["--init", model, "--val", "x", "word"]),
        ("a --seq beyond the context", 2, ["--seq 21", "20"], ["--init", model, "--val", "x", "--seq", 21]),
        ("shards that are not there", 1, ["none_*.bin"], ["--init", model, "--val", path("none_*.bin")]),
        ("a directory without validation shards", 1, ["val_*.bin"], ["--init", model, "--data", TMP]),
        ("a token beyond the vocabulary", 1, ["high.bin", "token 150 at position 3", "150"],
         ["--init", model, "--val", path("high.bin")]),
    ]
    for name, status, words, options in cases:
        with test("refuses " + name):
            refused(status, words, *options)
    with test("refuses data of another tokenizer than the model's, unless the shards alone are named"):
        corpus = write_corpus(path("others"))
        status, _, err = train(*TINY, "--data", corpus, "--steps", 0, "--eval-every", 0, "--out", path("own"))
        check(status == 0, err)
        with open(os.path.join(corpus, "tokenizer.bin"), "r+b") as file:
            file.seek(1024 + 2 * 65 + 1)  # the byte of token 65
            file.write(b"!")
        refused(2, ["257 tokens", "differ in token 65"], "--init", path("own"), "--data", corpus)
        status, _, err = evaluate("--init", path("own"), "--val", os.path.join(corpus, "val_*.bin"))
        check(status == 0, err)


# --- dev/hellaswag.py ---------------------------------------------------------------------------------------------------

def script(*options):
    done = subprocess.run([sys.executable, os.path.join(ROOT, "dev", "hellaswag.py"), *map(str, options)], cwd=ROOT,
                          capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_script():
    lines = [{"ind": 24, "ctx": "A man is on a roof. he", "label": 1,
              "endings": ["jumps.", "starts pulling up roofing.", "sl\u00e4ft.", "a"]},
             {"ctx": "Two", "endings": ["one", "two"], "label": 0, "split": "val"}]

    def published(name, objects):
        with open(path(name), "w", encoding="utf-8") as file:
            file.writelines((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in objects)
        return path(name)

    with test("dev/hellaswag.py writes the published questions, an ending with its blank"):
        status, out, err = script("--jsonl", published("val.jsonl", lines), "--tokenizer", "bytes", "--out", path("val.bin"))
        with open(path("val.bin"), "rb") as file:
            data = file.read()
        wanted = pack_file([pack_example(number, list(line["ctx"].encode()),
                                         [list((" " + ending).encode()) for ending in line["endings"]], line["label"])
                            for number, line in enumerate(lines)])
        check(status == 0 and data == wanted and "2 questions" in out, out, err)
        words = struct.unpack_from("<256i12H", data)
        check(words[:4] == (20240522, 1, 2, words[257]), words[:4])
        check(words[256] == 65535 and words[258:262] == (0, 1, 4, 22), words[256:])
        status, _, err = script("--jsonl", path("val.jsonl"), "--tokenizer", "bytes", "--limit", 1, "--out", path("one.bin"))
        check(status == 0, err)
        with open(path("one.bin"), "rb") as file:
            check(file.read()[1024:] == data[1024:1024 + words[257]], "--limit 1 is not the first question")
    with test("dev/hellaswag.py makes questions up, the same for the same seed"):
        for name, seed in (("a.bin", 1), ("b.bin", 1), ("c.bin", 2)):
            status, _, err = script("--made-up", 30, "--vocab", VOCAB, "--longest", CONTEXT + 1, "--seed", seed, "--out",
                                    path(name))
            check(status == 0, err)
        a, b, c = (open(path(name), "rb").read() for name in ("a.bin", "b.bin", "c.bin"))
        status, out, _ = evaluate("--init", model_folder(), "--hellaswag", path("a.bin"))
        check(a == b != c and status == 0 and scores(out)[0] == 30, out)
    cases = [
        ("no JSON", "{", ["line 2", "is no JSON"]),
        ("no text", {"endings": ["a", "b"], "label": 0}, ["ctx"]),
        ("half a character", {"ctx": "\ud800", "endings": ["b", "c"], "label": 0}, ["surrogate"]),
        ("half a character in an ending", {"ctx": "a", "endings": ["b", "c\udfff"], "label": 0}, ["surrogate"]),
        ("one ending", {"ctx": "a", "endings": ["b"], "label": 0}, ["endings", "at least two"]),
        ("no label, as in the test set", {"ctx": "a", "endings": ["b", "c"]}, ["label", "0 to 1"]),
        ("a label beyond its endings", {"ctx": "a", "endings": ["b", "c"], "label": 2}, ["label"]),
        ("more than the format holds", {"ctx": "a" * 33000, "endings": ["b", "c"], "label": 0}, ["65534"]),
    ]
    for name, line, words in cases:
        with test("dev/hellaswag.py refuses a line with " + name):
            status, _, err = script("--jsonl", published("bad.jsonl", [lines[0], line]), "--tokenizer", "bytes", "--out",
                                    path("bad.bin"))
            check(status == 1 and len(err.strip().split("\n")) == 1 and "bad.jsonl: line 2" in err, status, err)
            check(all(word in err for word in words) and not os.path.exists(path("bad.bin")), err)
    with test("dev/hellaswag.py says where the file is published"):
        status, _, err = script("--jsonl", path("none.jsonl"), "--tokenizer", "bytes", "--out", path("bad.bin"))
        check(status == 1 and len(err.strip().split("\n")) == 1, status, err)
        check("none.jsonl" in err and "master/data/hellaswag_val.jsonl" in err, err)
    with test("dev/hellaswag.py refuses an --out that is no regular file, and leaves it as it is"):
        os.mkfifo(path("out.fifo"))
        os.mkdir(path("out.folder"))
        for name in ("out.fifo", "out.folder"):
            before = os.stat(path(name))
            status, _, err = script("--made-up", 3, "--out", path(name))
            check(status == 1 and err == f"hellaswag.py: {path(name)}: is no regular file, and not written over\n", err)
            check(os.stat(path(name)).st_ino == before.st_ino, name, "is another")
    with test("dev/hellaswag.py writes to what a link names"):
        os.symlink("target.bin", path("link.bin"))
        for _ in range(2):
            status, _, err = script("--made-up", 3, "--out", path("link.bin"))
            check(status == 0 and os.path.islink(path("link.bin")) and os.path.isfile(path("target.bin")), status, err)
    with test("dev/hellaswag.py leaves nothing of a file that it cannot write"):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            status, _, err = script("--made-up", 30, "--out", path("large.bin"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        check(status == 1 and err == f"hellaswag.py: {path('large.bin')}: cannot be written: File too large\n", status, err)
        check(not [name for name in os.listdir(TMP) if name.startswith("large.bin")], os.listdir(TMP))


def main():
    try:
        test_validation()
        test_trainer_agrees()
        test_choices()
        test_training()
        test_faulty_files()
        test_refusals()
        test_script()
    finally:
        shutil.rmtree(TMP, ignore_errors=True)
    end()


if __name__ == "__main__":
    main()
