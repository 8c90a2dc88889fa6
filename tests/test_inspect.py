#!/usr/bin/env python3
"""train_gpt inspect: counts, histogram and windows are those of the tokens; every fault is found, and nothing else is."""
import os
import random
import re
import shutil
import struct
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from check import check, end, test  # noqa: E402
from trainer_runs import train, write_shard, write_tokenizer  # noqa: E402

FOLDER = tempfile.mkdtemp(prefix="flashgpt-inspect-")


def path_of(*names):
    return os.path.join(FOLDER, *names)


def write(name, data):
    os.makedirs(os.path.dirname(path_of(name)), exist_ok=True)
    with open(path_of(name), "wb") as file:
        file.write(data)
    return path_of(name)


def inspect(*options):
    return train("inspect", *options)


def rows(out):
    """token -> (percent, text) of the histogram."""
    row = re.compile(r"^ +(\d+) +([\d.]+)%  #* *(\".*\")?$", re.M)
    return {int(match[1]): (float(match[2]), match[3]) for match in row.finditer(out)}


def test_counts():
    os.makedirs(path_of("data"))
    text = b"".join(b"Word %d.\n" % (i % 37) for i in range(500))
    tokens = [*text[:2000], 256, *text[2000:], 256]
    write_shard(path_of("data", "train_0.bin"), tokens)
    write_shard(path_of("data", "val_0.bin"), tokens[:100])
    write_tokenizer(path_of("data", "tokenizer.bin"))
    shard = path_of("data", "train_0.bin")
    with test("a shard with its tokenizer: counts, documents, the histogram in order with its text, windows, no fault"):
        status, out, err = inspect("--top", 1000, "--windows", 2, "--length", 20, shard)
        check(status == 0 and not err and "faults    none" in out, status, out, err)
        check(f"{len(tokens)}, {len(set(tokens))} different, the largest 256, of a vocabulary of 257" in out, out)
        check(f"2 end with end-of-text, token 256; {len(tokens) / 2:.1f} tokens each" in out, out)
        found = rows(out)
        check(set(found) == set(tokens), sorted(set(tokens) ^ set(found)))
        for token in set(tokens):
            percent = 100 * tokens.count(token) / len(tokens)
            check(abs(found[token][0] - percent) < 0.006, token, found[token], percent)
        counts = [tokens.count(token) for token in found]
        check(counts == sorted(counts, reverse=True), "not from the most frequent on:", counts)
        check(found[ord("W")][1] == '"W"' and found[10][1] == '"\\n"' and found[256][1] == '"<|endoftext|>"', found)
        windows = re.findall(r"^  at (\d+) +\"(.*)\"$", out, re.M)
        wanted = [("0", text[:20].decode()), (str(len(tokens) - 20), text[-19:].decode() + "<|endoftext|>")]
        check([(at, shown.replace("\\n", "\n")) for at, shown in windows] == wanted, windows)
    with test("without a tokenizer: numbers, and no vocabulary but the one that is given"):
        alone = path_of("alone.bin")
        shutil.copy(shard, alone)
        status, out, err = inspect("--windows", 1, "--length", 5, "--top", 2, alone)
        check(status == 0 and " ".join(map(str, tokens[:5])) in out and "vocabulary" not in out, out, err)
        check(len(rows(out)) == 2 and f"{len(set(tokens)) - 2} others" in out, out)
        status, out, err = inspect("--tokenizer", path_of("data", "tokenizer.bin"), alone)
        check(status == 0 and '"Word 0.' in out, out, err)
    with test("a directory shows both parts, a glob what it matches"):
        status, out, err = inspect(path_of("data"))
        check(status == 0 and out.count("faults    none") == 2 and out.index("train_0") < out.index("val_0"), out, err)
        status, out, err = inspect(path_of("data", "v*_0.bin"))
        check(status == 0 and out.count("faults    none") == 1, out, err)
    with test("every form is named"):
        numbers = [random.Random(1).randrange(70000) for _ in range(300)]
        wide = write("wide.bin", struct.pack("<256i", 20240801, 7, 300, *[0] * 253) + struct.pack("<300I", *numbers))
        status, out, err = inspect(wide)
        check(status == 0 and "20240801 version 7, uint32" in out and f"the largest {max(numbers)}" in out, out, err)
        bare = write("bare.bin", struct.pack("<100H", *range(100)))
        status, out, err = inspect(bare)
        check(status == 0 and "no header (nanoGPT)" in out and "100, 100 different" in out, out, err)


def test_faults():
    good = list(range(97)) * 30
    cases = []

    def case(name, words, tokens=None, data=None, options=()):
        path = path_of(name.replace(" ", "_") + ".bin")
        if tokens:
            write_shard(path, tokens)
        else:
            write(os.path.basename(path), data)
        cases.append((name, words, path, options))

    header = struct.pack("<256i", 20240520, 1, 100, *[0] * 253)
    case("a token beyond the vocabulary", "2 tokens at or above the vocabulary of 97: the first is 98 at position 2910",
         good + [98, 3, 97], options=("--vocab", 97))
    case("zeros at the end", "the last 1024 tokens are all 0", good + [0] * 1024)
    case("a shard cut short", "truncated", data=header + b"\1\0" * 99)
    case("an empty file", "empty", data=b"")
    for name, magic, words in (("a model", 20240326, "a model of llm.c"), ("an optimizer", 20240327, "an optimizer's state"),
                               ("a tokenizer", 20240328, "a tokenizer"), ("questions", 20240522, "an evaluation file")):
        case(f"no shard but {name}", f"magic {magic} at byte 0: it is {words}",
             data=struct.pack("<256i", magic, 3, *[0] * 254))
    case("another version", "version 9", data=struct.pack("<256i", 20240520, 9, 4, *[0] * 253) + b"\1\0" * 4)
    for name, words, path, options in cases:
        with test(f"faults: {name}: said below the shard, counted at the end, status 1"):
            status, out, err = inspect(*options, path)
            check(status == 1 and "FAULT" in out and words in out, status, out)
            check(err == "train_gpt: 1 of 1 shard is faulty: see above\n", err)
    with test("faults: the other shards are still shown; what comes close to a fault is none"):
        write_shard(path_of("near.bin"), good + [96] + [0] * 1023)
        status, out, err = inspect("--vocab", 97, path_of("near.bin"), cases[2][2], cases[0][2])
        check(status == 1 and "2 of 3 shards are faulty" in err and out.count("FAULT") == 2, out, err)
        check("faults    none" in out[:out.index("cut_short")] and "1023 times 0 at position 2911" in out, out)
    with test("refusals: one sentence each"):
        os.makedirs(path_of("empty"))
        for options, status, words in (
                ([], 2, "expected a shard"), (["--top", "many", "x"], 2, "'many'"), (["--top"], 2, "value"),
                (["--bottom", "x"], 2, "--bottom"), ([path_of("none*")], 1, "matches no file"),
                (["--length", "0", "x"], 2, "from 1"), ([path_of("empty")], 1, "holds no shards"),
                (["--tokenizer", path_of("near.bin"), path_of("near.bin")], 1, "near.bin")):
            got, out, err = inspect(*options)
            check(got == status and words in err and err.count("\n") == 1, options, got, out, err)


def main():
    try:
        test_counts()
        test_faults()
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
    end()


if __name__ == "__main__":
    main()
