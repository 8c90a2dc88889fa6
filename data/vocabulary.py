"""Tokenizers for prepare.py: bytes, GPT-2's, and those of Hugging Face, each with the bytes of its tokens.

A tokenizer here is three things: how many tokens there are and what bytes they stand for (tokenizer.bin), which of them ends
a text, and a function from text to tokens. Merging is left to tiktoken or tokenizers, which are imported only where a
tokenizer needs them. GPT-2's files write bytes as visible characters; that is undone, so that decoding is concatenation.

Where a tokenizer cuts and merges text exactly as GPT-2's does, with merges of its own or not, its merges go into
tokenizer.bin too, and the trainer encodes prompts itself (data/bpe.h).
"""
import array
import contextlib
import functools
import json
import os
import re
import sys

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")

# How GPT-2 cuts text before it merges: contractions, words, numbers and marks with one blank before them, blanks.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Its successors' (GPT-4 and Llama 3; Qwen 2), as tokenizer.json files hold them.
LATER_PATTERNS = tuple(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits +
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+" for digits in (r"\p{N}{1,3}", r"\p{N}"))


class Fault(Exception):
    """One sentence that says what is wrong."""


class Tokenizer:
    """encode: str -> list of tokens, or None where tokens are bytes. table: the bytes of each token. splits: whether text
    may be cut at SAFE places. merges: (left, right, result), tokens all three, in the order of their ranks, where text is
    cut and merged as GPT-2 does; None where it is not."""

    def __init__(self, name, table, end_of_text, encode=None, splits=True, merges=None):
        self.name, self.table, self.end_of_text, self.encode, self.splits = name, table, end_of_text, encode, splits
        self.merges = merges
        self.vocab = len(table)
        self.width = 2 if self.vocab <= 65536 else 4
        longest = max(range(self.vocab), key=lambda token: len(table[token]))
        if len(table[longest]) > 255:
            raise Fault(f"{name}: token {longest} is {len(table[longest])} bytes long, tokenizer.bin holds at most 255")

    def pack(self, tokens):
        """The tokens as little-endian integers of this tokenizer's width."""
        packed = array.array("H" if self.width == 2 else "I", tokens)
        if sys.byteorder == "big":
            packed.byteswap()
        return packed.tobytes()


def import_library(*names):
    """The first of these modules that is installed."""
    for name in names:
        with contextlib.suppress(ImportError):
            return __import__(name)
    raise Fault(f"this tokenizer needs the Python package {' or '.join(names)}, and {sys.executable} has "
                f"{'neither' if len(names) > 1 else 'it not'}: {os.path.basename(sys.executable)} -m pip install {names[0]}")


def unicode_to_byte():
    """GPT-2 writes a byte as a character: visible ones of Latin-1 as themselves, the others as those from U+0100 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {**{chr(byte): byte for byte in visible}, **{chr(256 + i): byte for i, byte in enumerate(hidden)}}


def token_bytes(token, alphabet):
    """The bytes of a token that is written in GPT-2's alphabet; one outside of it is taken as it is."""
    try:
        return bytes(alphabet[character] for character in token)
    except KeyError:
        return token.encode()


def read_json(path):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except ValueError as error:
        raise Fault(f"{path}: is no JSON: {error}") from None


def dense_table(name, ids, to_bytes):
    """List of bytes by token, from token string -> number; numbers that no token has get no bytes."""
    if not ids or not all(isinstance(token, int) and 0 <= token < 2**24 for token in ids.values()):
        raise Fault(f"{name}: expected a table of tokens with numbers from 0 on")
    table = [b""] * (max(ids.values()) + 1)
    for token, number in ids.items():
        table[number] = to_bytes(token)
    return table


def read_merges(directory):
    """(name, vocabulary: token -> number, list of merges) of a directory with GPT-2's files, under either pair of names."""
    for vocabulary, merges in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        paths = os.path.join(directory, vocabulary), os.path.join(directory, merges)
        if all(map(os.path.isfile, paths)):
            break
    else:
        raise Fault(f"{directory}: expected vocab.bpe and encoder.json, or merges.txt and vocab.json, or tokenizer.json")
    ids = read_json(paths[0])
    if not isinstance(ids, dict) or END_OF_TEXT[0] not in ids:
        raise Fault(f"{paths[0]}: expected a table of tokens with {END_OF_TEXT[0]} among them")
    rows = []
    with open(paths[1], encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            row = tuple(line.split())
            if not row or (number == 1 and line.startswith("#version")):
                continue
            if len(row) != 2 or not {*row, "".join(row)} <= ids.keys():
                raise Fault(f"{paths[1]}: line {number}: expected two tokens that join to a third, got {line.strip()!r}")
            rows.append(row)
    return directory, ids, rows


def number_merges(ids, merges):
    """Pairs of token strings as (left, right, result) by numbers."""
    return [(ids[left], ids[right], ids[left + right]) for left, right in merges]


def merges_of_ranks(table, end_of_text):
    """The merges of a table whose numbers are ranks: a token's last merge joins the two parts that the earlier ones leave of
    its bytes. None where that is not so."""
    ranks, merges = {}, []
    for token, text in enumerate(table):
        if token == end_of_text:
            continue
        parts = [text[i:i + 1] for i in range(len(text))]
        while len(parts) > 2:
            pairs = [ranks.get(left + right, len(table)) for left, right in zip(parts, parts[1:])]
            best = min(range(len(pairs)), key=pairs.__getitem__)
            if pairs[best] == len(table):
                break
            parts[best:best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2 and parts[0] in ranks and parts[1] in ranks:
            merges.append((ranks[parts[0]], ranks[parts[1]], token))
        elif len(parts) != 1:
            return None
        ranks[text] = token
    return merges if len(ranks) == len(table) - 1 else None


def merges_tiktoken(name, ids, merges):
    """Through tiktoken, which takes the number of a token for its rank: None where the files do not have it so."""
    tiktoken = import_library("tiktoken")
    alphabet = unicode_to_byte()
    table = dense_table(name, ids, lambda token: token_bytes(token, alphabet))
    end = ids[END_OF_TEXT[0]]
    ranks = {text: number for number, text in enumerate(table) if number != end}
    if [ids["".join(pair)] for pair in merges] != list(range(256, 256 + len(merges))) or \
            len(ranks) != len(table) - 1 or any(len(text) != 1 for text in table[:256]):
        return None
    encoding = tiktoken.Encoding(name="local", pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                                 special_tokens={END_OF_TEXT[0]: end})
    return Tokenizer(name, table, end, encoding.encode_ordinary, merges=number_merges(ids, merges))


def merges_tokenizers(name, ids, merges):
    tokenizers = import_library("tokenizers")
    alphabet = unicode_to_byte()
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=merges))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return Tokenizer(name, dense_table(name, ids, lambda token: token_bytes(token, alphabet)), ids[END_OF_TEXT[0]],
                     lambda text: encoder.encode(text).ids, merges=number_merges(ids, merges))


def open_gpt2():
    """GPT-2's tokenizer, whose files the library fetches and keeps."""
    library = import_library("tiktoken", "tokenizers")
    try:
        if library.__name__ == "tokenizers":
            return open_tokenizer_json("gpt2", json.loads(library.Tokenizer.from_pretrained("gpt2").to_str()), None)
        encoding = library.get_encoding("gpt2")
    except Fault:
        raise
    except Exception as error:
        raise Fault(f"gpt2: {library.__name__} cannot fetch its files ({type(error).__name__}); offline, give "
                    "--tokenizer DIR with vocab.bpe and encoder.json") from None
    table = [encoding.decode_single_token_bytes(token) for token in range(encoding.n_vocab)]
    return Tokenizer("gpt2", table, encoding.eot_token, encoding.encode_ordinary,
                     merges=merges_of_ranks(table, encoding.eot_token))


def parts_of(stage):
    """The members of a pre-tokenizer or decoder of a tokenizer.json, one or a sequence."""
    stage = stage or {}
    return stage.get("pretokenizers") or stage.get("decoders") or [stage] if stage.get("type") == "Sequence" else [stage]


def splits_safely(description, ordinary):
    """Whether a tokenizer.json is known to cut at SAFE places: by GPT-2's pattern or a later one, no token reaching over."""
    if (description.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
        return False
    if any(token.get("lstrip") or token.get("rstrip") or re.search(r"\s", token["content"]) for token in ordinary):
        return False
    stages = parts_of(description.get("pre_tokenizer"))
    last = stages[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return False
    if len(stages) == 1:
        return last.get("use_regex", True)
    return len(stages) == 2 and stages[0].get("type") == "Split" and stages[0].get("behavior") == "Isolated" and \
        not stages[0].get("invert") and stages[0]["pattern"].get("Regex") in (GPT2_PATTERN,) + LATER_PATTERNS


def merges_as_gpt2(description, ids):
    """The merges of a tokenizer.json by numbers, where it cuts and merges text as GPT-2 does; else None."""
    model, stages = description["model"], parts_of(description.get("pre_tokenizer"))
    if model.get("type", "BPE") != "BPE" or description.get("normalizer") or len(stages) != 1 or \
            any(not token.get("special") for token in description.get("added_tokens") or []):
        return None
    stage = stages[0]
    if stage.get("type") != "ByteLevel" or stage.get("add_prefix_space") or not stage.get("use_regex", True):
        return None
    if any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback",
                                      "ignore_merges")) or not unicode_to_byte().keys() <= ids.keys():
        return None
    return number_merges(ids, [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges") or []])


def open_tokenizer_json(name, description, end_of_text):
    """A tokenizer of Hugging Face. Its special tokens are taken out before encoding, so that text which happens to spell one
    is text; nothing is added at the ends of a text either."""
    tokenizers = import_library("tokenizers")
    if not isinstance(description, dict) or "model" not in description:
        raise Fault(f"{name}: expected a tokenizer.json of Hugging Face, with a model in it")
    added = description.get("added_tokens") or []
    ordinary = [token for token in added if not token.get("special")]
    try:
        ids = tokenizers.Tokenizer.from_str(json.dumps(description)).get_vocab(with_added_tokens=True)
        encoder = tokenizers.Tokenizer.from_str(json.dumps({**description, "added_tokens": ordinary, "post_processor": None,
                                                            "truncation": None, "padding": None}))
    except Exception as error:
        raise Fault(f"{name}: tokenizers cannot read it: {error}") from None
    known = [token for token in ([end_of_text] if end_of_text else END_OF_TEXT) if token in ids]
    if not known:
        raise Fault(f"{name}: has none of the tokens {end_of_text or ' '.join(END_OF_TEXT)}; name its end-of-text token "
                    "with --end-of-text")
    stages = parts_of(description.get("pre_tokenizer")) + parts_of(description.get("decoder"))
    alphabet = unicode_to_byte() if any(stage.get("type") == "ByteLevel" for stage in stages) else None
    model = description["model"]
    prefix = model.get("continuing_subword_prefix") if model.get("type") == "WordPiece" else None
    literal = {token["content"] for token in added}

    def to_bytes(token):
        if token in literal:
            return token.encode()
        if alphabet:
            return token_bytes(token, alphabet)
        if prefix:
            return token[len(prefix):].encode() if token.startswith(prefix) else b" " + token.encode()
        if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):  # a byte that has no character of its own, as SentencePiece writes it
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    return Tokenizer(name, dense_table(name, ids, to_bytes), ids[known[0]],
                     lambda text: encoder.encode(text, add_special_tokens=False).ids, splits_safely(description, ordinary),
                     merges_as_gpt2(description, ids))


@functools.lru_cache(maxsize=1)
def open_tokenizer(spec, end_of_text=None):
    """The tokenizer that --tokenizer names; opened once in each process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are parallel already
    if spec == "bytes":
        return Tokenizer("bytes", [bytes([byte]) for byte in range(256)] + [END_OF_TEXT[0].encode()], 256)
    if spec == "gpt2" and not os.path.exists(spec):
        return open_gpt2()
    if os.path.isdir(spec):
        path = os.path.join(spec, "tokenizer.json")
        if not os.path.isfile(path):
            files = read_merges(spec)
            if import_library("tiktoken", "tokenizers").__name__ == "tiktoken":
                return merges_tiktoken(*files) or merges_tokenizers(*files)
            return merges_tokenizers(*files)
        spec = path
    if not os.path.isfile(spec):
        raise Fault(f"--tokenizer {spec}: no such file; expected bytes, gpt2, a directory or a tokenizer.json")
    return open_tokenizer_json(spec, read_json(spec), end_of_text)
