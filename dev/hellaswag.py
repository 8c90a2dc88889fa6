#!/usr/bin/env python3
"""Makes what `train_gpt --hellaswag` and `train_gpt evaluate --hellaswag` read from HellaSwag as published.

    python3 dev/hellaswag.py --jsonl hellaswag_val.jsonl --tokenizer gpt2 --out hellaswag_val.bin
    python3 dev/hellaswag.py --made-up 200 --vocab 257 --out made_up.bin

HellaSwag's validation set, hellaswag_val.jsonl, has 10042 questions and lies at
    https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl
Each line is an object with ctx, the beginning of a text, endings, of which one is right, and its number, label. An ending's
tokens are those of a blank and the ending. A --tokenizer is one that data/prepare.py takes: the model's. --made-up writes
questions of random tokens, for tests. The format is llm.c's (data/hellaswag.h); a file made by llm.c is read as well.
"""
import argparse
import contextlib
import json
import os
import random
import stat
import struct
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data"))
from vocabulary import Fault, open_tokenizer  # noqa: E402

MAGIC, VERSION, START, EXAMPLES_MOST = 20240522, 1, 65535, 65536
SOURCE = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"


def pack_example(number, context, endings, label):
    """An example of tokens as bytes."""
    words = [START, 0, number, label, len(endings), len(context), *context]
    for ending in endings:
        words += [len(ending), *ending]
    words[1] = 2 * len(words)
    if words[1] >= 65536:
        raise Fault(f"has {words[1]} bytes of tokens, the format holds 65534")
    if max(max(context), *map(max, endings)) >= START:
        raise Fault("has tokens from 65535 on, which the format does not hold: it is made for smaller vocabularies")
    return struct.pack(f"<{len(words)}H", *words)


def pack_file(examples):
    """A file's bytes from a list of packed examples."""
    header = [MAGIC, VERSION, len(examples), max(map(len, examples)), *[0] * 252]
    return struct.pack("<256i", *header) + b"".join(examples)


def encoder(tokenizer):
    """str -> tokens."""
    return tokenizer.encode or (lambda text: list(text.encode()))


def read_line(line, encode):
    """(context, endings, label) in tokens from a line of the published file."""
    try:
        question = json.loads(line)
    except ValueError as error:
        raise Fault(f"is no JSON: {error}") from None
    if not isinstance(question, dict):
        raise Fault("is no JSON object")
    context, endings, label = (question.get(key) for key in ("ctx", "endings", "label"))
    if not isinstance(context, str) or not context:
        raise Fault("has no text \"ctx\"")
    if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(ending, str) for ending in endings):
        raise Fault("has no list \"endings\" of at least two texts")
    if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < len(endings):
        raise Fault(f"has no \"label\" from 0 to {len(endings) - 1} (the test set is published without)")
    for text in (context, *endings):
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise Fault("holds half a surrogate pair, which is no character")
    return encode(context), [encode(" " + ending) for ending in endings], label


def read_questions(path, encode, limit):
    """Packed examples of the published file, at most `limit` of them."""
    examples = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file):
                if len(examples) == limit:
                    break
                try:
                    examples.append(pack_example(number, *read_line(line, encode)))
                except Fault as fault:
                    raise Fault(f"{path}: line {number + 1} {fault}") from None
    except OSError as error:
        raise Fault(f"{path}: {error.strerror}; HellaSwag's validation set is published at {SOURCE}") from None
    except UnicodeDecodeError as error:
        raise Fault(f"{path}: is no UTF-8: {error.reason}") from None
    if not examples:
        raise Fault(f"{path}: holds no questions")
    return examples


def make_questions(count, vocab, longest, seed):
    """(context, four endings, label) of random tokens; a row has at most `longest` tokens."""
    generator = random.Random(seed)
    for _ in range(count):
        length = generator.randint(1, longest - 1)
        context = [generator.randrange(vocab) for _ in range(length)]
        endings = [[generator.randrange(vocab) for _ in range(generator.randint(1, longest - length))] for _ in range(4)]
        yield context, endings, generator.randrange(4)


def check_target(path):
    """Refuses what a file would take the place of: a device, a FIFO, a directory."""
    with contextlib.suppress(OSError):  # what is not there is made, or else writing it says why not
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise Fault(f"{path}: is no regular file, and not written over")


def write_file(path, data):
    """Writes under a temporary name first, so that a file is complete or not there. A link stays one to what is written."""
    target = os.path.realpath(path)
    temporary = target + ".tmp"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
        os.replace(temporary, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise Fault(f"{path}: cannot be written: {error.strerror}") from None


def whole(least, most):
    def parse(text):
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"got {value}, expected {least} to {most}")
        return value
    return parse


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--jsonl", metavar="FILE", help="the published file")
    source.add_argument("--made-up", metavar="N", type=whole(1, EXAMPLES_MOST), help="random questions instead")
    parser.add_argument("--out", metavar="FILE", required=True)
    parser.add_argument("--tokenizer", default="gpt2", help="bytes, gpt2, a directory or a tokenizer.json [gpt2]")
    parser.add_argument("--limit", metavar="N", type=whole(1, EXAMPLES_MOST), default=EXAMPLES_MOST,
                        help="take the first N questions only")
    parser.add_argument("--vocab", metavar="V", type=whole(1, START), default=257, help="made up of tokens below V [257]")
    parser.add_argument("--longest", metavar="N", type=whole(2, 10000), default=48,
                        help="made up: context and ending have at most N tokens [48]")
    parser.add_argument("--seed", metavar="N", type=int, default=1, help="of what is made up [1]")
    return parser.parse_args(argv)


def main(argv):
    args = parse_arguments(argv)
    try:
        check_target(args.out)
        if args.jsonl:
            examples = read_questions(args.jsonl, encoder(open_tokenizer(args.tokenizer)), args.limit)
        else:
            examples = [pack_example(number, *question) for number, question in
                        enumerate(make_questions(args.made_up, args.vocab, args.longest, args.seed))]
        data = pack_file(examples)
        write_file(args.out, data)
    except Fault as fault:
        sys.exit(f"hellaswag.py: {fault}")
    print(f"{args.out}: {len(examples)} questions, {len(data)} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
