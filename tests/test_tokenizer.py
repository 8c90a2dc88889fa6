"""The tokenizer in C beside Python's: character classes beside Unicode's tables, pieces beside a regular expression, tokens
beside tiktoken's and tokenizers', for all characters, much text, and what is no text."""
import array
import ctypes
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unicodedata

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "tests"), os.path.join(ROOT, "data")]
import prepare  # noqa: E402
import unicode  # noqa: E402
import vocabulary  # noqa: E402
from check import check, end, skip, test  # noqa: E402

SHARED = os.path.join(ROOT, "..", "shared", "data")
GPT2 = os.path.join(SHARED, "gpt2")
SOURCES = ("tokenizer", "bpe", "unicode", "unicode_classes", "vocabulary", "json", "files", "error")
SURROGATES = range(0xD800, 0xE000)
CHARACTERS = [code for code in range(0x110000) if code not in SURROGATES]
MIXED_BYTES = 50_000_000
BYTES_PER_SECOND = 10e6  # that encoding must reach on one core


def need(name):
    try:
        return __import__(name)
    except ImportError:
        return skip(f"the Python package {name} is not installed")


def need_gpt2():
    if not os.path.isdir(GPT2):
        skip("no ../shared/data/gpt2 with vocab.bpe and encoder.json")


# --- the library ------------------------------------------------------------------------------------------------------

class Library:
    """data/tokenizer.c and what it needs, through ctypes."""

    def __init__(self, folder):
        path = os.path.join(folder, "libtokenizer.so")
        sources = [os.path.join(ROOT, "data", name + ".c") for name in SOURCES]
        subprocess.run([*os.environ.get("CC", "cc").split(), "-std=gnu11", "-O3", "-D_GNU_SOURCE", "-shared", "-fPIC",
                        "-I", ROOT, *sources, "-o", path, "-lm"], check=True)
        self.c = ctypes.CDLL(path)
        size, text, place = ctypes.c_size_t, ctypes.c_char_p, ctypes.c_void_p
        for name, result, arguments in (
                ("tokenizer_open", place, [text, text]), ("vocabulary_open", place, [text, text]),
                ("tokenizer_vocab", ctypes.c_int64, [place]), ("tokenizer_end_of_text", ctypes.c_int32, [place]),
                ("tokenizer_encode", ctypes.c_int, [place, text, size, place, size, ctypes.POINTER(size), text]),
                ("tokenizer_decode", place, [place, ctypes.c_int32, ctypes.POINTER(size)]),
                ("bpe_piece", size, [text, size]), ("unicode_class", ctypes.c_int, [ctypes.c_uint32])):
            function = getattr(self.c, name)
            function.restype, function.argtypes = result, arguments

    def pieces(self, text):
        place, at = ctypes.c_char_p(text), 0
        base, found = ctypes.cast(place, ctypes.c_void_p).value, []
        while at < len(text):
            size = self.c.bpe_piece(ctypes.c_char_p(base + at), len(text) - at)
            found.append(text[at:at + size])
            at += size
        return found


class Opened:
    """A tokenizer.bin, or the tokenizer in a directory, opened by the library."""

    def __init__(self, library, path):
        self.c, self.error, self.seconds = library.c, ctypes.create_string_buffer(1024), 0.0
        function = self.c.vocabulary_open if os.path.isdir(path) else self.c.tokenizer_open
        self.handle = function(path.encode(), self.error)
        if not self.handle:
            raise ValueError(self.error.value.decode())

    def encode(self, text):
        """Tokens of bytes, as an array of int32; raises the library's sentence."""
        out, count = (ctypes.c_int32 * max(len(text), 1))(), ctypes.c_size_t()
        start = time.perf_counter()
        status = self.c.tokenizer_encode(self.handle, text, len(text), out, len(text), ctypes.byref(count), self.error)
        self.seconds = time.perf_counter() - start
        if status:
            raise ValueError(self.error.value.decode())
        return array.array("i", memoryview(out).cast("B")[:4 * count.value].tobytes())

    def table(self):
        """(end-of-text token, bytes of each token)."""
        count = self.c.tokenizer_vocab(self.handle)
        return self.c.tokenizer_end_of_text(self.handle), [self.decode([token]) for token in range(count)]

    def decode(self, tokens):
        length, parts = ctypes.c_size_t(), []
        for token in tokens:
            place = self.c.tokenizer_decode(self.handle, token, ctypes.byref(length))
            parts.append(ctypes.string_at(place, length.value))
        return b"".join(parts)


def write_tokenizer(folder, tokenizer):
    path = os.path.join(folder, "tokenizer.bin")
    with open(path, "wb") as file:
        file.write(prepare.pack_tokenizer(tokenizer))
    return path


# --- characters and pieces --------------------------------------------------------------------------------------------

def test_classes(folder, library):
    classes = unicode.read_classes(unicode.PATH)
    with test(f"unicode: the table agrees with Unicode {unicodedata.unidata_version}; a planted fault is found"):
        check(unicode.check(unicodedata) is None, unicode.check(unicodedata))
        with open(unicode.PATH, encoding="ascii") as file:
            text = file.read()
        entry = f"0x{ord('0') << 2 | 2:06x}"
        check(text.count(entry) == 1, "no entry for the digits")
        spoiled = os.path.join(folder, "spoiled.c")
        with open(spoiled, "w", encoding="ascii") as file:
            file.write(text.replace(entry, f"0x{ord('1') << 2 | 2:06x}"))
        fault = unicode.check(unicodedata, spoiled)
        check(fault and "U+0030" in fault, "found", fault)
    with test("unicode: the C function has every character's class"):
        wrong = [code for code in range(0x110000) if library.c.unicode_class(code) != classes[code]]
        check(not wrong and library.c.unicode_class(0x110000) == 0 and library.c.unicode_class(2**32 - 1) == 0, wrong[:5])
    with test("unicode: letters, numbers and blanks are those of tiktoken, for every character, assigned or not"):
        tiktoken = need("tiktoken")
        for number, pattern in ((1, r"\p{L}"), (2, r"\p{N}"), (3, r"\s")):
            encoding = tiktoken.Encoding(name=pattern, pat_str=pattern, special_tokens={},
                                         mergeable_ranks={bytes([byte]): byte for byte in range(256)})
            theirs = {*map(ord, bytes(encoding.encode_ordinary("".join(map(chr, CHARACTERS)))).decode())}
            ours = {code for code in CHARACTERS if classes[code] == number}
            check(ours <= theirs, pattern, "differ:", [hex(code) for code in sorted(ours - theirs)[:5]])
            later = theirs - ours
            if later:  # a tiktoken with newer tables: only what was no character yet may differ, and is left out below
                print(f"     {pattern}: tiktoken's tables are newer than {unicode.VERSION}, {len(later)} characters more")
                check(all(unicodedata.category(chr(code)) == "Cn" for code in later), pattern, sorted(later)[:5])
                CHARACTERS[:] = [code for code in CHARACTERS if code not in later]
    return classes


def expression(classes):
    """GPT-2's pattern for Python's re, its classes written out in ranges of characters."""
    ranges = {1: [], 2: [], 3: []}
    start = 0
    for code in range(1, 0x110001):
        if code == 0x110000 or classes[code] != classes[start]:
            if classes[start]:
                ranges[classes[start]].append(f"\\U{start:08x}-\\U{code - 1:08x}")
            start = code
    letters, numbers, blanks = ("".join(ranges[number]) for number in (1, 2, 3))
    pattern = vocabulary.GPT2_PATTERN.replace(r"[^\s\p{L}\p{N}]", f"[^{blanks}{letters}{numbers}]")
    pattern = pattern.replace(r"\S", f"[^{blanks}]").replace(r"\s", f"[{blanks}]")
    return re.compile(pattern.replace(r"\p{L}", f"[{letters}]").replace(r"\p{N}", f"[{numbers}]"))


def mixed_text(rng, classes, count):
    """Fragments of every kind: blanks, letters of one script or of all, numbers, anything, ASCII, contractions."""
    by_class = [[code for code in CHARACTERS if classes[code] == number] for number in range(4)]
    turns = ["'s", "'ll", "'ve", "don't", " 've", "'VE", "''re", "\n\n  a", "<|endoftext|>", " \n", "\r\n",
             "\u00a0 ", "\x1c"]
    fragments = []
    for _ in range(count):
        length, kind = rng.choice((1, 1, 2, 3, 5, 8, 40, 150)), rng.randrange(9)
        if kind < 4:
            codes = rng.choices(by_class[(1, 2, 3, 0)[kind]], k=min(length, 8) if kind == 2 else length)
        elif kind == 4:
            codes = rng.choices(CHARACTERS, k=length)
        elif kind == 5:
            codes = rng.choices(range(32, 127), k=length)
        elif kind == 6:
            codes = [32] * length
        elif kind == 7:
            base = rng.choice(by_class[1]) & ~63
            codes = [code for code in (base + rng.randrange(64) for _ in range(length)) if code not in SURROGATES]
        else:
            codes = map(ord, rng.choice(turns))
        fragments.append("".join(map(chr, codes)))
    return fragments


def test_pieces(library, classes):
    with test("pieces: those of GPT-2's pattern, in random Unicode"):
        pattern = expression(classes)
        text = "".join(mixed_text(random.Random(11), classes, 6000))
        ours, theirs = library.pieces(text.encode()), [piece.encode() for piece in pattern.findall(text)]
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
        check(ours == theirs, "piece", first, "is", ours[first:first + 2], "expected", theirs[first:first + 2])
        check(len(ours) > 15000, "only", len(ours), "pieces")


# --- GPT-2 ------------------------------------------------------------------------------------------------------------

def compare(opened, encode, text, what):
    """Whether the tokens are those of `encode`."""
    ours, theirs = opened.encode(text.encode()), array.array("i", encode(text))
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    return check(ours == theirs, what, ": token", first, "is", ours[first:first + 3].tolist(), "expected",
                 theirs[first:first + 3].tolist())


def test_gpt2(folder, library, classes):
    def opened():
        need_gpt2()
        return Opened(library, path)

    def reference():
        """tiktoken's function from text to tokens."""
        need_gpt2()
        need("tiktoken")
        return vocabulary.merges_tiktoken(*files).encode

    if os.path.isdir(GPT2):
        files = name, ids, pairs = vocabulary.read_merges(GPT2)
        alphabet, end_of_text = vocabulary.unicode_to_byte(), ids["<|endoftext|>"]
        table = vocabulary.dense_table(name, ids, lambda token: vocabulary.token_bytes(token, alphabet))
        merges = vocabulary.number_merges(ids, pairs)
        path = write_tokenizer(folder, vocabulary.Tokenizer(name, table, end_of_text, merges=merges))

    with test("gpt2: 50000 merges, which are found also where only ranks are known"):
        need_gpt2()
        check(len(merges) == 50000 and merges[0] == (220, 83, 256), merges[:2])
        check(vocabulary.merges_of_ranks(table, end_of_text) == merges, "the ranks give other merges")
        mixed = [*table]
        mixed[300], mixed[40000] = mixed[40000], mixed[300]
        check(vocabulary.merges_of_ranks(mixed, end_of_text) is None, "numbers that are no ranks pass for them")
        check(opened().encode(b"Hello world").tolist() == [15496, 995], opened().encode(b"Hello world"))
    with test("gpt2: the same from vocab.bpe and encoder.json in C"):
        tokenizer, other = opened(), Opened(library, GPT2)
        check(other.table() == tokenizer.table(), "the tables differ")
        with open(os.path.join(SHARED, "shakespeare.txt"), "rb") as file:
            text = file.read()
        check(other.encode(text) == tokenizer.encode(text), "the tokens differ")
    with test("gpt2: every token, every byte, every pair of bytes"):
        tokenizer = opened()
        for token in range(50256):
            bytes_ = tokenizer.decode([token])
            tokens = tokenizer.encode(bytes_)
            whole = bytes_.decode(errors="ignore").encode() == bytes_  # else it begins or ends within a character
            check(bytes_ == table[token], token, bytes_)
            check(tokens.tolist() == [token] or not whole, "token", token, "is encoded as", tokens)
            check(tokenizer.decode(tokens) == bytes_, "token", token, "does not come back")
        for a in range(256):
            check(tokenizer.encode(bytes([a])).tolist() == [table.index(bytes([a]))], "byte", a)
            for b in range(256):
                text = bytes([a, b])
                check(tokenizer.decode(tokenizer.encode(text)) == text, text)
    with test("gpt2: the tokens of tiktoken for every character, alone and among others"):
        tokenizer, encode = opened(), reference()
        for form in ("{0}", "a{0}1{0} {0}{0}\n{0}.", "  {0}'s"):
            compare(tokenizer, encode, "".join(form.format(chr(code)) for code in CHARACTERS), form)
    with test("gpt2: the tokens of tiktoken for all text in ../shared/data, at 10 MB/s or more on one core"):
        tokenizer, encode = opened(), reference()
        for name in sorted(os.listdir(SHARED)):
            if not name.endswith(".txt"):
                continue
            with open(os.path.join(SHARED, name), encoding="utf-8", newline="") as file:
                text = file.read()
            compare(tokenizer, encode, text, name)
            data, seconds = text.encode(), []
            for _ in range(5):
                tokenizer.encode(data)
                seconds.append(tokenizer.seconds)
            speed = len(data) / min(seconds)
            print(f"     {name}: {speed / 1e6:.1f} MB/s", flush=True)
            check(speed >= BYTES_PER_SECOND, name, f"{speed / 1e6:.1f} MB/s")
    with test(f"gpt2: the tokens of tiktoken for {MIXED_BYTES / 1e6:.0f} MB of mixed Unicode, at 10 MB/s or more"):
        tokenizer, encode = opened(), reference()
        rng = random.Random(12)
        fragments, total, seconds = mixed_text(rng, classes, 40000), 0, 0.0
        while total < MIXED_BYTES:
            text = "".join(rng.choices(fragments, k=60000))
            if not compare(tokenizer, encode, text, f"at {total} bytes"):
                break
            total += len(text.encode())
            seconds += tokenizer.seconds
        print(f"     mixed Unicode: {total / seconds / 1e6:.1f} MB/s", flush=True)
        check(total / seconds >= BYTES_PER_SECOND, f"{total / seconds / 1e6:.1f} MB/s")
    with test("gpt2: long runs of one character and of few"):
        tokenizer, encode = opened(), reference()
        for text in ("a" * 100000, " " * 100000, "ab" * 50000, "\n" * 10000 + "x", "'" * 20000, "-=" * 20000, "1" * 30000):
            compare(tokenizer, encode, text, repr(text[:4]))
    with test("gpt2: bytes that are no UTF-8 come back one for one"):
        tokenizer = opened()
        rng = random.Random(13)
        whole = "".join(mixed_text(rng, classes, 2000)).encode()
        for text in (rng.randbytes(300000), bytes(range(256)) * 50, whole[1:], whole[:-1],
                     bytes(byte for byte in whole if rng.random() < 0.95),
                     bytes(byte ^ (rng.random() < 0.02) << rng.randrange(8) for byte in whole)):
            tokens = tokenizer.encode(text)
            check(tokenizer.decode(tokens) == text, len(text), "bytes come back otherwise")
            check(len(tokens) < len(text), "nothing was merged")
    with test("gpt2: a tokenizer.bin without merges says what it lacks"):
        need_gpt2()
        with open(path, "rb") as file:
            data = file.read()
        old = os.path.join(folder, "old.bin")
        with open(old, "wb") as file:
            file.write(data[:16] + bytes(8) + data[24:len(data) - 12 * 50000])
        old = Opened(library, old)
        check(old.decode([15496, 995]) == b"Hello world", old.decode([15496, 995]))
        try:
            old.encode(b"Hello")
            check(False, "text was encoded")
        except ValueError as fault:
            check("lacks the merges" in str(fault) and "old.bin" in str(fault), fault)


def test_tokenizer_json(folder, library, classes):
    with test("tokenizer.json: byte-level BPE with GPT-2's rule is encoded as the library tokenizers does"):
        tokenizers = need("tokenizers")
        built = tokenizers.Tokenizer(tokenizers.models.BPE())
        built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        built.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=900, special_tokens=["<|pad|>", "<|endoftext|>"],
                                                 initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
                                                 show_progress=False)
        sentences = ["".join(mixed_text(random.Random(seed), classes, 50)) for seed in range(20)]
        built.train_from_iterator(sentences + ["the cat and the hat, the bat's 1234 \u00e9t\u00e9s don't\n" * 40], trainer)
        os.makedirs(os.path.join(folder, "json"))
        path = os.path.join(folder, "json", "tokenizer.json")
        built.save(path)
        read = vocabulary.open_tokenizer_json(path, vocabulary.read_json(path), None)
        check(read.merges and len(read.merges) == read.vocab - 258, read.vocab, len(read.merges or []))
        opened = Opened(library, write_tokenizer(folder, read))
        letters = [chr(code) for code in range(0x250) if classes[code]]  # old letters: that library has older tables
        rng = random.Random(14)
        words = ["the ", "cat", " hat", "'s", "\n\n", "12", " ", "don't", "<|endoftext|>", "\u4e2d", *letters]
        text = "".join(rng.choice(words) for _ in range(20000))
        compare(opened, read.encode, text, "random text")
        check(opened.decode(opened.encode(text.encode())) == text.encode(), "it does not come back")
        check(opened.decode([0, 1]) == b"<|pad|><|endoftext|>", opened.decode([0, 1]))
        direct = Opened(library, os.path.dirname(path))
        check(direct.table() == opened.table(), "C reads another table from the file itself")
        check(direct.encode(text.encode()) == opened.encode(text.encode()), "C encodes otherwise from the file itself")
    with test("tokenizer.json: one that cuts or merges in another way is decoded, and not encoded"):
        need("tokenizers")
        description = vocabulary.read_json(path)
        model, stage = description["model"], description["pre_tokenizer"]
        later = {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": vocabulary.LATER_PATTERNS[0]}, "behavior": "Isolated", "invert": False},
            {**stage, "use_regex": False}]}
        for change in ({"normalizer": {"type": "NFC"}}, {"pre_tokenizer": {**stage, "add_prefix_space": True}},
                       {"pre_tokenizer": {**stage, "use_regex": False}}, {"pre_tokenizer": later},
                       {"model": {**model, "end_of_word_suffix": "~"}},
                       {"added_tokens": [*description["added_tokens"], {
                           "id": read.vocab, "content": "cat!", "special": False, "single_word": False, "lstrip": False,
                           "rstrip": False, "normalized": False}]}):
            other = vocabulary.open_tokenizer_json(path, json.loads(json.dumps({**description, **change})), None)
            with open(path, "w", encoding="utf-8") as file:
                json.dump({**description, **change}, file)
            for source in (write_tokenizer(folder, other), os.path.dirname(path)):
                opened = Opened(library, source)
                check(opened.table()[1][:read.vocab] == read.table, [*change], "gives another table")
                try:
                    opened.encode(b"the cat")
                    check(False, "was encoded in spite of", [*change], source)
                except ValueError as fault:
                    check("lacks the merges" in str(fault), fault)


def main():
    folder = tempfile.mkdtemp(prefix="flashgpt-tokenizer-")
    try:
        library = Library(folder)
        classes = test_classes(folder, library)
        test_pieces(library, classes)
        test_gpt2(folder, library, classes)
        test_tokenizer_json(folder, library, classes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    end()


if __name__ == "__main__":
    main()
