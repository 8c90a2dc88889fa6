"""prepare.py and grammar.py: the shards are the text, whatever the number of processes; the entropy is the text's; refusals
leave nothing behind."""
import collections
import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "tests"), os.path.join(ROOT, "data")]
import prepare  # noqa: E402
import vocabulary  # noqa: E402
from check import check, end, skip, test  # noqa: E402
from grammar import Grammar  # noqa: E402

SCRIPT = os.path.join(ROOT, "data", "prepare.py")
GPT2 = os.path.join(ROOT, "..", "shared", "data", "gpt2")
FILES = ["corpus.json", "tokenizer.bin", "train_000000.bin", "val_000000.bin"]
# Of the first 2000 sentences of the default seed: changes where the words or rules do, and must not between machines.
BUILTIN_DIGEST = "29490d70d30466cc"


# --- helpers ----------------------------------------------------------------------------------------------------------

def read_shard(path):
    """(magic, version, tokens) of a shard, by the words of shards.h."""
    with open(path, "rb") as file:
        data = file.read()
    magic, version, count = struct.unpack_from("<iiI", data)
    width = {20240520: 2, 20240801: 4}[magic]
    assert len(data) == 1024 + width * count, (path, len(data), count)
    return magic, version, list(struct.unpack_from("<%d%s" % (count, "HI"[width == 4]), data, 1024))


def read_part(out, part):
    """Shards of one part, in order: lists of tokens."""
    return [read_shard(os.path.join(out, name))[2] for name in sorted(os.listdir(out)) if name.startswith(part + "_")]


def read_table(path):
    """(end-of-text token, bytes of each token, merges) of a tokenizer.bin, by the words of tokenizer.h; merges are None
    where its rule is not known."""
    with open(path, "rb") as file:
        data = file.read()
    magic, version, count, end_of_text, merge_count, rule = struct.unpack_from("<6i", data)
    assert (magic, version) == (20240328, 2) and rule in (0, 1), (magic, version, rule)
    table, at = [], 1024
    for _ in range(count):
        table.append(data[at + 1:at + 1 + data[at]])
        at += 1 + data[at]
    assert at + 12 * merge_count == len(data), (at, merge_count, len(data))
    return end_of_text, table, [*struct.iter_unpack("<3i", data[at:])] if rule else None


def write(path, data):
    with open(path, "wb") as file:
        file.write(data if isinstance(data, bytes) else data.encode())
    return path


def listing(folder):
    """Name -> digest of every file below a folder."""
    found = {}
    for base, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(base, name), "rb") as file:
                found[os.path.relpath(os.path.join(base, name), folder)] = hashlib.sha256(file.read()).hexdigest()
    return found


def call(*arguments):
    """prepare.main in this process: (status, what it said)."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status = prepare.main([str(argument) for argument in arguments])
        except SystemExit as leaving:
            status = leaving.code
    return status, said.getvalue()


@contextlib.contextmanager
def setting(**values):
    """Other values for names of prepare.py meanwhile."""
    before = {name: getattr(prepare, name) for name in values}
    for name, value in values.items():
        setattr(prepare, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(prepare, name, value)


def installed(name):
    try:
        __import__(name)
    except ImportError:
        return False
    return True


# --- the grammar ------------------------------------------------------------------------------------------------------

def first_sets(rules):
    """FIRST of every symbol, and which symbols may be empty: the textbook's fixed point."""
    first = collections.defaultdict(set)
    empty = set()

    def of(symbols):
        found = set()
        for symbol in symbols:
            found |= first[symbol] if symbol in rules else {symbol}
            if symbol not in empty:
                return found, False
        return found, True

    while True:
        before = sum(map(len, first.values())) + len(empty)
        for symbol, rule in rules.items():
            for _, alternative in rule:
                found, nothing = of(alternative)
                first[symbol] |= found
                if nothing:
                    empty.add(symbol)
        if sum(map(len, first.values())) + len(empty) == before:
            return of, empty


def follow_sets(rules, of):
    follow = collections.defaultdict(set)
    while True:
        before = sum(map(len, follow.values()))
        for symbol, rule in rules.items():
            for _, alternative in rule:
                for i, part in enumerate(alternative):
                    if part in rules:
                        found, nothing = of(alternative[i + 1:])
                        follow[part] |= found | (follow[symbol] if nothing else set())
        if sum(map(len, follow.values())) == before:
            return follow


def prediction_table(rules):
    """(symbol, next word) -> (probability, alternative); raises where two alternatives claim the same word: not LL(1)."""
    of, _ = first_sets(rules)
    follow = follow_sets(rules, of)
    table = {}
    for symbol, rule in rules.items():
        for probability, alternative in rule:
            found, nothing = of(alternative)
            for word in found | (follow[symbol] if nothing else set()):
                if (symbol, word) in table:
                    raise ValueError(f"{symbol} at {word!r} has two ways")
                table[symbol, word] = probability, alternative
    return table


def log_probability(text, rules, table):
    """Of one sentence, by parsing its text: cut into words by their blanks and capitals, then predicted."""
    words = re.findall(r" [a-z]+|[A-Z][a-z]*|[.?]|[ \n]", text)
    assert "".join(words) == text, text
    total, stack = 0.0, ["Sentence"]
    for word in words:
        while stack and stack[-1] in rules:
            probability, alternative = table[stack.pop(), word]
            total += math.log(probability)
            stack.extend(reversed(alternative))
        assert stack and stack.pop() == word, (text, word)
    assert not stack, text
    return total


def test_grammar():
    with test("grammar: LL(1), so that a sentence has one derivation, for several seeds; a planted ambiguity is found"):
        for seed in range(8):
            rules = Grammar(seed).rules
            for symbol, rule in rules.items():
                total = sum(p for p, _ in rule)
                check(abs(total - 1) < 1e-12, "the probabilities of", symbol, "sum to", total)
            prediction_table(rules)
        try:
            prediction_table({**rules, "Manner": ((0.5, ()), (0.5, (" while", "Clause")))})
            check(False, "the checker lets an ambiguous grammar pass")
        except ValueError:
            pass

    with test("grammar: the entropy rate is that of the text, and no word ends a sentence"):
        for seed in (1, 2):
            grammar = Grammar(seed)
            table = prediction_table(grammar.rules)
            rate = grammar.entropy_rate()
            sentences = list(itertools.islice(grammar.text(seed), 12000))
            for sentence in sentences:
                check(re.fullmatch(r"[^.?\n]+[.?][ \n]", sentence), "no sentence or more than one:", repr(sentence))
            surprise = [-log_probability(sentence, grammar.rules, table) for sentence in sentences]
            lengths = [len(sentence) for sentence in sentences]
            excess = [s - rate * n for s, n in zip(surprise, lengths)]  # of mean 0 if the rate is right
            sigma = math.sqrt(sum(e * e for e in excess)) / sum(lengths)
            estimate = sum(surprise) / sum(lengths)
            check(abs(estimate - rate) < 4 * sigma, "estimate", estimate, "rate", rate, "standard error", sigma)
            check(sigma < 0.004 * rate, "the estimate is too coarse to tell:", sigma)
            mean = sum(lengths) / len(lengths)
            spread = math.sqrt(sum((n - mean) ** 2 for n in lengths)) / len(lengths)
            check(abs(mean - grammar.sentence_length()) < 4 * spread, "mean length", mean, "of", grammar.sentence_length())

    with test("grammar: a grammar solved by hand"):
        grammar = Grammar(1)
        grammar.rules = {"Sentence": ((0.75, ("ab", "Sentence")), (0.25, ("End",))), "End": ((0.5, ("c",)), (0.5, ("ddd",)))}
        entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / 0.25 + math.log(2)  # 4 choices, then one coin
        check(abs(grammar.sentence_entropy() - entropy) < 1e-12, grammar.sentence_entropy(), "expected", entropy)
        check(abs(grammar.sentence_length() - 8) < 1e-12, grammar.sentence_length(), "expected 3 * 2 + 2")

    with test("grammar: the same text on every machine"):
        text = "".join(itertools.islice(Grammar(1).text(1), 2000))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        check(digest == BUILTIN_DIGEST, "digest", digest, "expected", BUILTIN_DIGEST)
        other = "".join(itertools.islice(Grammar(2).text(1), 50))
        check(not text.startswith(other), "seeds 1 and 2 give the same text")


# --- bytes ------------------------------------------------------------------------------------------------------------

def test_bytes(folder):
    rng = random.Random(5)
    texts = [bytes(range(256)) * 3, b"a", rng.getrandbits(8 * 5000).to_bytes(5000, "little"), b"end\n"]
    paths = [write(os.path.join(folder, f"text{i}"), text) for i, text in enumerate(texts)]
    tokens = [token for text in texts for token in [*text, 256]]

    with test("bytes: shards hold the text, end of text after each file, for any cutting and number of processes"):
        wanted = None
        for workers, piece, shard in ((1, 4 << 20, 10**8), (1, 7, 10**8), (3, 100, 10**8), (1, 64, 1000), (2, 333, 1000)):
            out = os.path.join(folder, "bytes")
            with setting(PIECE=piece):
                status, said = call("--text", *paths, "--out", out, "--workers", workers, "--shard-tokens", shard, "--force")
            check(status == 0, said)
            train, val = read_part(out, "train"), read_part(out, "val")
            check(sum(train + val, []) == tokens, "workers", workers, "piece", piece, ": not the tokens of the text")
            check(sum(map(len, val)) == len(tokens) // 10, "validation has", sum(map(len, val)), "of", len(tokens))
            check(all(len(one) == shard for one in train[:-1]) and len(train[-1]) <= shard, [len(one) for one in train])
            check(len(train) == -(-sum(map(len, train)) // shard), len(train), "training shards of", shard)
            if shard == 10**8:
                wanted = wanted or listing(out)
                check(listing(out) == wanted, "workers", workers, "piece", piece, ": the files differ")
                check(sorted(wanted) == FILES, sorted(wanted))

    with test("bytes: header, tokenizer.bin and corpus.json"):
        magic, version, _ = read_shard(os.path.join(folder, "bytes", "train_000000.bin"))
        check((magic, version) == (20240520, 1), magic, version)
        end_of_text, table, merges = read_table(os.path.join(folder, "bytes", "tokenizer.bin"))
        check(end_of_text == 256 and table == [bytes([b]) for b in range(256)] + [b"<|endoftext|>"], end_of_text, len(table))
        check(merges is None, "bytes have merges")
        with open(os.path.join(folder, "bytes", "corpus.json"), encoding="utf-8") as file:
            corpus = json.load(file)
        check(corpus["tokenizer"] == "bytes" and corpus["vocab"] == 257 and corpus["entropy_rate"] is None, corpus)
        check(corpus["train_tokens"] + corpus["val_tokens"] == len(tokens), corpus)
        check([(source["path"], source["bytes"]) for source in corpus["sources"]] == [*zip(paths, map(len, texts))], corpus)

    with test("bytes: the validation part is the fraction asked for, at the end"):
        for fraction in (0.01, 0.5, 0.99):
            out = os.path.join(folder, "fraction")
            status, said = call("--text", paths[2], "--out", out, "--val-fraction", fraction, "--force")
            val = read_part(out, "val")[0]
            check(status == 0 and len(val) == int(5001 * fraction) and val == [*texts[2], 256][-len(val):], fraction, said)

    with test("builtin: twice the same files, with the entropy rate of the grammar"):
        outs = [os.path.join(folder, f"builtin{i}") for i in range(2)]
        for i, out in enumerate(outs):
            status, said = call("--text", "builtin", "--builtin-bytes", 100000, "--out", out, "--workers", 1 + i)
            check(status == 0, said)
        check(listing(outs[0]) == listing(outs[1]), "the files differ")
        with open(os.path.join(outs[0], "corpus.json"), encoding="utf-8") as file:
            corpus = json.load(file)
        check(corpus["entropy_rate"] == Grammar(1).entropy_rate(), corpus)
        text = bytes(sum(read_part(outs[0], "train") + read_part(outs[0], "val"), [])[:-1])
        check(100000 <= len(text) < 101000 and text.decode().startswith(next(Grammar(1).text(1))), len(text), text[:40])


# --- merges -----------------------------------------------------------------------------------------------------------

def tricky_text(rng, length):
    """Text that brings every kind of neighbours together: blanks of all sorts, contractions, digits, marks, scripts."""
    parts = ["\n", "\n", "\n\n", "\r\n", " ", " ", " ", "  ", "\t", "\u00a0", "\u2003", "a", "Zebra", "don't", "I'LL", "'s",
             "'", "3", "1234567", ".", "...", "!\n", "-", "_", "\u00e9t\u00e9", "\u4e2d\u6587", "\u0301", "\U0001f600",
             "x y", "<|endoftext|>"]
    return "".join(rng.choice(parts) for _ in range(length))


def python_pattern(pattern):
    """A pattern of the tokenizers for Python's re, which knows no \\p{L} and \\p{N} but has their like."""
    for theirs, ours in ((r"[^\s\p{L}\p{N}]", r"(?:[^\s\w]|_)"), (r"[^\r\n\p{L}\p{N}]", r"(?:[^\r\n\w]|_)"),
                         (r"\p{L}", r"[^\W\d_]"), (r"\p{N}", r"\d")):
        pattern = pattern.replace(theirs, ours)
    return re.compile(pattern)


def every_cut(text, pattern):
    return [match.end() for match in pattern.finditer(text)]


def test_cuts(folder):
    with test("cuts: at every safe place of random text, the patterns cut too, and what is left and right stays as it is"):
        rng = random.Random(1)
        patterns = [python_pattern(pattern) for pattern in (vocabulary.GPT2_PATTERN,) + vocabulary.LATER_PATTERNS]
        cuts = 0
        for _ in range(150):
            text = tricky_text(rng, 60)
            data = text.encode()
            for place in sorted({cut for pattern in prepare.SAFE for cut in every_cut(data, pattern)}):
                left, right = data[:place].decode(), data[place:].decode()
                cuts += 1
                for pattern in patterns:
                    check(pattern.findall(left) + pattern.findall(right) == pattern.findall(text), repr(left), repr(right))
        check(cuts > 400, "only", cuts, "cuts were tried")
        check(patterns[0].findall("a\n\n") + ["b"] != patterns[0].findall("a\n\nb"),
              "a cut after two newlines would pass as well: this test cannot tell")

    with test("cuts: pieces cover a document, end at safe places, and stay near their size"):
        data = tricky_text(random.Random(2), 20000).encode()
        document = prepare.find_documents([write(os.path.join(folder, "cuts"), data)])[0]
        for window in (50, 1000, 1 << 20):
            with setting(PIECE_MERGES=window):
                pieces = list(prepare.cut_document(document, 0, document.size, 1000, True))
            ends = [piece.end for piece in pieces]
            check([piece.start for piece in pieces] == [0] + ends[:-1] and ends[-1] == len(data), "the pieces leave gaps")
            check([piece.closes for piece in pieces] == [False] * (len(pieces) - 1) + [True], "end of text is elsewhere")
            safe = {cut for pattern in prepare.SAFE for cut in every_cut(data, pattern)}
            check(set(ends[:-1]) <= safe and len(pieces) > 20, "pieces end elsewhere:", sorted(set(ends[:-1]) - safe)[:5])

    with test("cuts: the validation part of merged tokens begins at a safe place or with a file"):
        long = prepare.find_documents([write(os.path.join(folder, "long"), b"one line\n" * 100)])[0]
        solid = prepare.find_documents([write(os.path.join(folder, "solid"), b"x" * 900)])[0]
        for documents, position, splits, wanted in (
                ([long], 450, True, (0, 450)), ([long], 451, True, (0, 459)), ([long], 899, True, (0, 891)),
                ([long, solid], 1000, True, (1, 0)), ([solid, long], 450, True, (1, 0)), ([solid, long], 901, True, (1, 9)),
                ([long, solid], 450, False, (1, 0)), ([long, solid], 900, True, (1, 0)), ([solid], 450, True, None)):
            got = prepare.find_split(documents, position, splits)
            check(got == wanted, documents, position, splits, "gave", got, "expected", wanted)


def test_merges(folder):
    with test("merges: a vocabulary above 65536 goes into uint32 shards, in order, over many shards"):
        wide = vocabulary.Tokenizer("wide", [b"?"] * 70000, 69999, lambda text: [65000 + 30 * ord(one) for one in text])
        texts = ["some words\nand more of them\n" * 40, "the last file has words too\n" * 40]
        paths = [write(os.path.join(folder, f"wide{i}"), text) for i, text in enumerate(texts)]
        out = os.path.join(folder, "wide")
        with setting(open_tokenizer=lambda spec, end_of_text: wide, PIECE_MERGES=100):
            status, said = call("--text", *paths, "--out", out, "--workers", 1, "--shard-tokens", 300)
        check(status == 0, said)
        magic, version, _ = read_shard(os.path.join(out, "train_000000.bin"))
        check((magic, version) == (20240801, 7), magic, version)
        train, val = read_part(out, "train"), read_part(out, "val")
        wanted = [token for text in texts for token in wide.encode(text) + [69999]]
        check(sum(train + val, []) == wanted, "the tokens are not those of the text")
        check(all(len(shard) == 300 for shard in train[:-1]) and len(val) == 1, [len(shard) for shard in train + val])

    libraries = [name for name in ("tiktoken", "tokenizers") if installed(name)]
    with test("merges: GPT-2 in pieces and processes gives the tokens of the whole text, and decodes to its bytes"):
        if not os.path.isdir(GPT2):
            skip("no ../shared/data/gpt2 with vocab.bpe and encoder.json")
        if not libraries:
            skip("neither tiktoken nor tokenizers is installed")
        files = vocabulary.read_merges(GPT2)
        opened = [getattr(vocabulary, f"merges_{name}")(*files) for name in libraries]
        texts = [tricky_text(random.Random(seed), 3000) for seed in (3, 4)]
        paths = [write(os.path.join(folder, f"tricky{i}"), text) for i, text in enumerate(texts)]
        wanted = [token for text in texts for token in opened[0].encode(text) + [50256]]
        check(opened[0].vocab == 50257 and opened[0].end_of_text == 50256, opened[0].vocab, opened[0].end_of_text)
        check(opened[0].encode("Hello world") == [15496, 995], opened[0].encode("Hello world"))
        for other in opened[1:]:
            check(other.table == opened[0].table, "the libraries' tables differ")
            check(other.encode(texts[0]) == opened[0].encode(texts[0]), "the libraries' tokens differ")
        for workers, piece in ((1, 1 << 20), (1, 100), (2, 1000)):
            out = os.path.join(folder, "gpt2")
            with setting(PIECE_MERGES=piece):
                status, said = call("--text", *paths, "--tokenizer", GPT2, "--out", out, "--workers", workers, "--force")
            check(status == 0, said)
            tokens = sum(read_part(out, "train") + read_part(out, "val"), [])
            check(tokens == wanted, "workers", workers, "piece", piece, ": not the tokens of the whole text")
        _, table, merges = read_table(os.path.join(out, "tokenizer.bin"))
        check(merges == opened[0].merges and len(merges) == 50000, len(merges or []), "merges were written")
        text = b"".join(table[token] for token in tokens if token != 50256)
        check(text == "".join(texts).encode(), "the tokens do not decode to the text")

    with test("merges: GPT-2 as a tokenizer.json of Hugging Face: the same table and tokens, specials are text"):
        if "tokenizers" not in libraries or not os.path.isdir(GPT2):
            skip("tokenizers is not installed, or no ../shared/data/gpt2")
        import tokenizers
        plain = vocabulary.merges_tokenizers(*vocabulary.read_merges(GPT2))
        _, ids, merges = vocabulary.read_merges(GPT2)
        built = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=merges))
        built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        built.decoder = tokenizers.decoders.ByteLevel()
        built.add_special_tokens(["<|endoftext|>", "<|extra|>"])
        path = os.path.join(folder, "tokenizer.json")
        built.save(path)
        read = vocabulary.open_tokenizer(path)
        check(read.vocab == 50258 and read.end_of_text == 50256 and read.splits, read.vocab, read.end_of_text, read.splits)
        check(read.table[:50256] == plain.table[:50256] and read.table[50257] == b"<|extra|>", read.table[50256:])
        text = tricky_text(random.Random(6), 500)
        check(read.encode(text) == plain.encode(text), "the tokens differ")
        built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
        built.save(path)
        prefixing = vocabulary.open_tokenizer_json("x", vocabulary.read_json(path), None)
        check(not prefixing.splits, "each piece would get a prefix blank")

    with test("merges: one text that may be cut nowhere is encoded whole, and its tokens are parted"):
        text = write(os.path.join(folder, "uncut"), "".join(f"word{i} " for i in range(500)))
        calls = []

        def encode(string):
            calls.append(string)
            return [len(word) for word in string.split()]

        out = os.path.join(folder, "uncut_out")
        with setting(open_tokenizer=lambda *_: vocabulary.Tokenizer("words", [b"?"] * 300, 299, encode, splits=False)):
            status, said = call("--text", text, "--out", out, "--workers", 1, "--shard-tokens", 200)
        check(status == 0 and len(calls) == 1, status, said, f"encoded in {len(calls)} pieces")
        parts = {part: sum(read_part(out, part), []) for part in ("train", "val")}
        check(len(parts["val"]) == 50, f"{len(parts['val'])} validation tokens, expected a tenth of 501")
        expected = [len(f"word{i}") for i in range(500)] + [299]
        check(parts["train"] + parts["val"] == expected, "the parts are not the tokens of the text")

    with test("merges: a word-level tokenizer.json, of which no safe cut is known, takes a single text"):
        if "tokenizers" not in libraries:
            skip("tokenizers is not installed")
        import tokenizers
        built = tokenizers.Tokenizer(tokenizers.models.WordLevel({"red": 0, "blue": 1, "[UNK]": 2, "[EOS]": 3}, "[UNK]"))
        built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        path, out = os.path.join(folder, "words.json"), os.path.join(folder, "words_out")
        built.save(path)
        vocabulary.open_tokenizer.cache_clear()
        status, said = call("--text", write(os.path.join(folder, "colours"), "red blue green " * 100), "--out", out,
                            "--tokenizer", path)
        check(status == 0, status, said)
        tokens = sum(read_part(out, "train") + read_part(out, "val"), [])
        check(tokens == [0, 1, 2] * 100 + [3], tokens[:12])

    with test("merges: without a library, one sentence says what to install"):
        stand_in = write_small_gpt2(os.path.join(folder, "small"))
        hidden = {name: sys.modules.get(name) for name in ("tiktoken", "tokenizers")}
        sys.modules.update(tiktoken=None, tokenizers=None)
        vocabulary.open_tokenizer.cache_clear()
        try:
            for spec, words in ((stand_in, "tiktoken or tokenizers"), ("gpt2", "tiktoken or tokenizers")):
                status, said = call("--text", os.path.join(folder, "long"), "--tokenizer", spec, "--out",
                                    os.path.join(folder, "none"))
                check(status == 1 and words in said and "pip install tiktoken" in said and said.count("\n") == 1, spec, said)
        finally:
            for name, module in hidden.items():
                if module:
                    sys.modules[name] = module
                else:
                    del sys.modules[name]


def write_small_gpt2(folder):
    """A directory like GPT-2's with 256 bytes, two merges and end of text."""
    os.makedirs(folder, exist_ok=True)
    letters = sorted(vocabulary.unicode_to_byte())
    ids = {token: number for number, token in enumerate([*letters, "ab", "abc", "<|endoftext|>"])}
    write(os.path.join(folder, "encoder.json"), json.dumps(ids))
    write(os.path.join(folder, "vocab.bpe"), "#version: 0.2\na b\nab c\n")
    return folder


def test_alphabet(folder):
    with test("merges: GPT-2's alphabet stands for every byte once, and is undone"):
        alphabet = vocabulary.unicode_to_byte()
        check(sorted(alphabet.values()) == list(range(256)), "not a table of 256 bytes")
        check([alphabet[letter] for letter in "A\u0120\u010a\u0100"] == [65, 32, 10, 0], "wrong bytes")
        check(vocabulary.token_bytes("\u0120caf\u00c3\u00a9", alphabet) == " caf\u00e9".encode(), "wrong bytes of a token")
        _, ids, merges = vocabulary.read_merges(write_small_gpt2(os.path.join(folder, "small")))
        check(merges == [("a", "b"), ("ab", "c")] and len(ids) == 259, merges, len(ids))
        for line, words in (("a b c\n", "line 2"), ("a zz\n", "line 2"), ("b a\n", "line 2")):
            write(os.path.join(folder, "small", "vocab.bpe"), "#version: 0.2\n" + line)
            try:
                vocabulary.read_merges(os.path.join(folder, "small"))
                check(False, repr(line), "was taken for a merge")
            except prepare.Fault as fault:
                check(words in str(fault), fault)


# --- refusals ---------------------------------------------------------------------------------------------------------

def test_refusals(folder):
    good = write(os.path.join(folder, "good"), b"some text\n" * 50)
    out = os.path.join(folder, "refused")
    with test("refusals: one sentence, status not 0, nothing left behind"):
        write(os.path.join(folder, "nothing"), b"")
        write(os.path.join(folder, "three"), b"abc")
        write(os.path.join(folder, "bad.json"), b"{\"model\": ")
        for arguments, status, words in (
                (["--text", os.path.join(folder, "missing")], 1, "missing: No such file"),
                (["--text", good, os.path.join(folder, "nothing")], 1, "nothing: is empty"),
                (["--text", folder], 1, "is a directory"),
                (["--text", os.path.join(folder, "three")], 1, "the val part would have 0 tokens"),
                (["--text", os.path.join(folder, "three"), "--val-fraction", "0.8"], 1, "train part would have 1 tokens"),
                (["--text", good, "--val-fraction", "0"], 2, "more than 0 and less than 1"),
                (["--text", good, "--val-fraction", "1"], 2, "more than 0 and less than 1"),
                (["--text", good, "--val-fraction", "many"], 2, "many"),
                (["--text", good, "--shard-tokens", "1"], 2, "expected 2 to"),
                (["--text", good, "--workers", "0"], 2, "expected 1 to"),
                (["--text", good, "--tokenizer", "words"], 1, "--tokenizer words: no such file"),
                (["--text", good, "--tokenizer", os.path.join(folder, "bytes")], 1, "expected vocab.bpe and encoder.json"),
                (["--text", good, "--tokenizer", os.path.join(folder, "bad.json")], 1, "is no JSON"),
                (["--text", good, "--colour", "red"], 2, "--colour")):
            got, said = call(*arguments, "--out", out)
            check(got == status and words in said, arguments, "gave", got, said, "expected", status, words)
            check(status == 2 or said.count("\n") == 1, arguments, "said more than a sentence:", said)
            check(not os.path.exists(out), arguments, "left", os.path.exists(out) and os.listdir(out))
        got, said = call("--text", good, "--out", good)
        check(got == 1 and "good: is no directory" in said and said.count("\n") == 1, got, said)

    with test("refusals: shards of another run stay, unless --force; other files stay always"):
        check(call("--text", good, "--out", out, "--shard-tokens", 100)[0] == 0, "the first run failed")
        write(os.path.join(out, "notes"), "mine")
        before = listing(out)
        check(len(before) == 9, sorted(before))
        got, said = call("--text", good, "--out", out)
        check(got == 1 and "already holds" in said and "--force" in said and listing(out) == before, got, said)
        got, said = call("--text", good, "--out", out, "--force")
        check(got == 0 and sorted(listing(out)) == sorted([*FILES, "notes"]), said, sorted(listing(out)))

    with test("refusals: a write that fails leaves what was there"):
        before = listing(out)
        big = write(os.path.join(folder, "big"), b"x" * 400000)
        for place, kept in ((out, before), (os.path.join(folder, "new"), None)):
            for workers in (1, 2):
                process = run_script("--text", big, "--out", place, "--force", "--workers", workers, limit=300000)
                check(process.returncode == 1 and "File too large" in process.stderr and process.stderr.count("\n") == 1,
                      process.returncode, process.stderr)
                check((listing(place) if os.path.exists(place) else None) == kept, sorted(listing(place)))

    with test("refusals: text that is no UTF-8 is named with its byte where the tokenizer needs characters"):
        path = write(os.path.join(folder, "latin"), b"plain text \xe9t\xe9\n" + b"more of it\n" * 20)
        words = vocabulary.Tokenizer("words", [b"?"] * 300, 299, lambda text: [1] * len(text))
        with setting(open_tokenizer=lambda spec, end_of_text: words):
            got, said = call("--text", path, "--out", os.path.join(folder, "latin_out"), "--workers", 1)
        check(got == 1 and "latin: byte 11 is 0xe9" in said, got, said)


def run_script(*arguments, limit=None):
    def lower():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, preexec_fn=lower if limit else None, timeout=60)


def test_stopping(folder):
    """A text of zeros that takes no room on the disk keeps a process busy for long enough to be stopped."""
    path, out = os.path.join(folder, "zeros"), os.path.join(folder, "stopped")
    with open(path, "wb") as file:
        file.truncate(3 << 30)

    def start_and(number):
        process = subprocess.Popen([sys.executable, SCRIPT, "--text", path, "--out", out, "--workers", "2"],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        deadline = time.time() + 20
        train = os.path.join(out, ".prepare", "train_000000.bin")
        while time.time() < deadline and not (os.path.exists(train) and os.stat(train).st_blocks > 100):
            time.sleep(0.01)
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)  # of the session that was started above
        else:
            process.send_signal(number)
        said = process.communicate(timeout=30)
        return process.returncode, "".join(said)

    with test("stopping: SIGINT and SIGTERM leave no file and say so"):
        for number in (signal.SIGINT, signal.SIGTERM):
            status, said = start_and(number)
            check(status == 130 and number.name in said and said.count("\n") == 1, status, said)
            check(not os.path.exists(out), number.name, "left", os.path.exists(out) and os.listdir(out))

    with test("stopping: after a kill nothing has a final name, and the next run clears up and succeeds"):
        start_and(signal.SIGKILL)
        check(os.listdir(out) == [".prepare"], os.listdir(out))
        got, said = call("--text", os.path.join(folder, "good"), "--out", out)
        check(got == 0 and ".prepare" not in os.listdir(out), got, said, os.listdir(out))

    with test("stopping: two at once in one place: the second is refused"):
        staging = prepare.Staging(os.path.join(folder, "twice"), False)
        got, said = call("--text", os.path.join(folder, "good"), "--out", os.path.join(folder, "twice"))
        check(got == 1 and "another process" in said, got, said)
        staging.discard()


def main():
    folder = tempfile.mkdtemp(prefix="flashgpt-prepare-")
    try:
        test_grammar()
        test_bytes(folder)
        test_cuts(folder)
        test_alphabet(folder)
        test_merges(folder)
        test_refusals(folder)
        test_stopping(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    end()


if __name__ == "__main__":
    main()
