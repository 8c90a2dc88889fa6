#!/usr/bin/env python3
"""Text in, shards of tokens out: what train_gpt --data DIR reads.

    python3 data/prepare.py --text builtin --out runs/toy
    python3 data/prepare.py --text book.txt --out runs/book
    python3 data/prepare.py --text a.txt b.txt --tokenizer gpt2 --out runs/ab
    python3 data/prepare.py tinystories --limit 100M --out runs/stories

OUT gets train_*.bin and val_*.bin (see shards.h), tokenizer.bin (see tokenizer.h) and corpus.json, which names the sources
and counts the tokens. Each file of --text is a document: its tokens are followed by one end-of-text token. A tokenizer is
    bytes            the 256 bytes and end of text, 257 tokens: needs no library
    gpt2             GPT-2's, through tiktoken or tokenizers, whichever is installed
    DIR              GPT-2's or one like it, from local files: vocab.bpe and encoder.json, or merges.txt and vocab.json
    TOKENIZER.json   any tokenizer of Hugging Face, through tokenizers

A data set of the web is downloaded (see sources.py) and its documents are tokenized, the first --limit tokens of it where
that is given; only the files that these need are downloaded.

The validation part is the tail of the corpus. Lines picked at random would be easier to predict than text that is truly new,
since their neighbours, often on the same subject in the same words, would be in the training part; and a tail stays the
same however many shards or processes there are.

Nothing is held in memory but a few megabytes a process. As bytes, every token's place is known beforehand, so processes
write their pieces straight into the shards. With merges it is not: processes encode pieces, and this one writes them in
order. A piece of text may end only where the tokenizer never joins what stands on both sides (see SAFE); then the tokens are
exactly those of the whole text encoded in one go. A tokenizer of which no such places are known gets each file whole, and
where there is but one file, its tokens are parted instead of its text.

All files are written in OUT/.prepare and renamed at the end, corpus.json last. So an OUT with a corpus.json is complete, and
a run that fails, is stopped or is killed leaves the files of OUT as they were.
"""
import argparse
import collections
import concurrent.futures
import contextlib
import errno
import fcntl
import glob
import json
import os
import re
import shutil
import signal
import stat
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import sources  # noqa: E402
from grammar import Grammar  # noqa: E402
from progress import Progress  # noqa: E402
from vocabulary import Fault, open_tokenizer  # noqa: E402

HEADER_BYTES = 1024
SHARD_UINT16 = (20240520, 1)  # magic, version
SHARD_UINT32 = (20240801, 7)
TOKENIZER = (20240328, 2)
RULE_UNKNOWN, RULE_GPT2 = 0, 1  # how text is cut before it is merged
SHARD_LIMIT = 2**32 - 2  # the header's count says the low 32 bits, and all of them set mean "unfinished"
PIECE = 4 << 20          # bytes of text that a process takes at a time, as bytes
PIECE_MERGES = 1 << 20   # the same where it encodes, which takes some hundred times as long
OUTPUTS = ("corpus.json", "train_*.bin", "val_*.bin", "tokenizer.bin")

# Where all patterns of vocabulary.py cut, whatever else stands around: after a newline between two visible ASCII characters,
# else between an ASCII letter and a blank that a letter follows. A newline with more blanks beside it is no such place: at
# the end of a text they are one piece, before a word the last one stands alone.
SAFE = (re.compile(rb"[!-~]\n(?=[!-~])"), re.compile(rb"[A-Za-z](?= [A-Za-z])"))


class Stopped(Exception):
    """The process was told to end."""


Document = collections.namedtuple("Document", "path size modified")
# Bytes [start, end) of a document; `closes` where the end-of-text token follows.
Piece = collections.namedtuple("Piece", "path start end closes")


# --- what processes do ------------------------------------------------------------------------------------------------

def read_piece(piece):
    with open(piece.path, "rb", buffering=0) as file:
        file.seek(piece.start)
        parts, missing = [], piece.end - piece.start
        while missing:
            part = file.read(missing)
            if not part:
                raise Fault(f"{piece.path}: became shorter while it was read: ends at byte {piece.end - missing}, expected "
                            f"{piece.end}")
            parts.append(part)
            missing -= len(part)
    return b"".join(parts)


def write_all(file, data, offset, path):
    view = memoryview(data)
    try:
        while view:
            done = os.pwrite(file, view, offset)
            view, offset = view[done:], offset + done
    except OSError as error:
        raise Fault(f"{path}: cannot write at byte {offset}: {error.strerror}") from None


def place_bytes(pieces, path, offset):
    """Writes pieces as byte tokens to a shard from a byte offset on. Returns how many bytes of text they were."""
    size = sum(piece.end - piece.start + piece.closes for piece in pieces)
    tokens = bytearray(2 * size)  # the high bytes stay 0, but for end of text, which is 256
    at = 0
    for piece in pieces:
        text = read_piece(piece)
        tokens[at:at + 2 * len(text):2] = text
        at += 2 * len(text)
        if piece.closes:
            tokens[at + 1] = 1
            at += 2
    file = os.open(path, os.O_WRONLY)
    try:
        write_all(file, tokens, offset, path)
    finally:
        os.close(file)
    return size


def encode_pieces(pieces, spec, end_of_text):
    """The packed tokens of some pieces, and how many bytes of text they were."""
    tokenizer = open_tokenizer(spec, end_of_text)
    tokens = []
    for piece in pieces:
        try:
            tokens += tokenizer.encode(read_piece(piece).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise Fault(f"{piece.path}: byte {piece.start + error.start} is 0x{error.object[error.start]:02x}, expected "
                        "UTF-8 text for this tokenizer (bytes takes any file)") from None
        if piece.closes:
            tokens.append(tokenizer.end_of_text)
    return tokenizer.pack(tokens), sum(piece.end - piece.start for piece in pieces)


def start_process():
    """Leaves Ctrl-C to the first process, which then ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def in_order(workers, function, tasks):
    """function(*task) of every task, in their order, computed by so many processes with a bounded number under way."""
    if workers == 1:
        yield from (function(*task) for task in tasks)
        return
    with concurrent.futures.ProcessPoolExecutor(workers, initializer=start_process) as pool:
        pending = collections.deque()
        try:
            for task in tasks:
                pending.append(pool.submit(function, *task))
                if len(pending) > 3 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except concurrent.futures.process.BrokenProcessPool:
            raise Fault("a process ended without a result, most likely for want of memory; try fewer --workers") from None
        finally:
            for future in pending:
                future.cancel()


# --- where text is cut ------------------------------------------------------------------------------------------------

def find_safe(path, start, end, last=False):
    """The first (or last) place in (start, end) of a file where a piece may end, or None."""
    with open(path, "rb") as file:
        starts = range(start, end, PIECE_MERGES)
        for window in reversed(starts) if last else starts:
            first = max(window - 2, 0)  # a place is told by two bytes before it and two after it
            file.seek(first)
            text = file.read(min(window + PIECE_MERGES, end) + 2 - first)
            for pattern in SAFE:
                places = [first + match.end() for match in pattern.finditer(text)]
                places = [place for place in places if start < place < end]
                if places:
                    return places[-1] if last else places[0]
    return None


def cut_document(document, start, end, size, safe):
    """Pieces of bytes [start, end) of a document, of about this size; `safe` where they may end only at SAFE places."""
    while start < end:
        stop = min(start + size, end)
        if safe and stop < end:
            stop = find_safe(document.path, stop, end) or end
        yield Piece(document.path, start, stop, stop == document.size)
        start = stop


def bundle(pieces, size):
    """Lists of consecutive pieces of about this size together, so that many small documents make few tasks."""
    bundled, total = [], 0
    for piece in pieces:
        bundled.append(piece)
        total += piece.end - piece.start
        if total >= size:
            yield bundled
            bundled, total = [], 0
    if bundled:
        yield bundled


def find_split(documents, position, splits):
    """(number of a document, byte in it) where the validation part of merged tokens begins: the first place at or after a
    byte of the corpus where text may be cut, or else the last one before it, or None."""
    for number, document in enumerate(documents):
        if position < document.size:
            break
        position -= document.size
    if position == 0:
        return number, 0
    after = find_safe(document.path, position - 1, document.size) if splits else None
    if after:
        return number, after
    if number + 1 < len(documents):
        return number + 1, 0
    before = find_safe(document.path, 0, position, last=True) if splits else None
    return (number, before) if before else (number, 0) if number else None


# --- the output directory ---------------------------------------------------------------------------------------------

class Staging:
    """OUT/.prepare, where files are made. A lock on it tells a process at work from the remains of one that was killed."""

    def __init__(self, out, force):
        self.out, self.path = out, os.path.join(out, ".prepare")
        self.made = not os.path.isdir(out)
        if self.made and os.path.lexists(out):
            raise Fault(f"{out}: is no directory, expected one to write to, or a name that is free")
        os.makedirs(out, exist_ok=True)
        found = self.outputs()
        if found and not force:
            raise Fault(f"{out}: already holds {os.path.basename(found[0])}; give another --out, or --force to replace it")
        os.makedirs(self.path, exist_ok=True)
        self.lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.lock)
            raise Fault(f"{out}: another process is preparing it now") from None
        for name in os.listdir(self.path):
            os.unlink(self.file(name))

    def file(self, name):
        return os.path.join(self.path, name)

    def outputs(self):
        """What OUT holds of an earlier run."""
        return [path for pattern in OUTPUTS for path in sorted(glob.glob(os.path.join(glob.escape(self.out), pattern)))]

    def discard(self):
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)
        if self.made:
            with contextlib.suppress(OSError):
                os.rmdir(self.out)

    def publish(self):
        """Gives the files their final names: corpus.json is the first old one to go and the last new one to come."""
        names = sorted(os.listdir(self.path), key=lambda name: (name == "corpus.json", name))
        for name in names:
            sync(self.file(name))
        for path in self.outputs():
            os.unlink(path)
        for name in names:
            os.rename(self.file(name), os.path.join(self.out, name))
        os.rmdir(self.path)
        os.close(self.lock)
        sync(self.out)


def sync(path):
    """Waits until a file, or a directory's list of names, is on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot, has nothing to wait for
            raise Fault(f"{path}: cannot be written to the disk: {error.strerror}") from None
    finally:
        os.close(file)


def header(magic_version, *fields):
    return struct.pack("<256i", *magic_version, *fields, *[0] * (254 - len(fields)))


def shard_header(width, count):
    return header(SHARD_UINT16 if width == 2 else SHARD_UINT32, count - (1 << 32 if count >= 1 << 31 else 0))


def shard_name(part, number):
    return f"{part}_{number:06d}.bin"


def write_file(path, data):
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_all(file, data, 0, path)
    finally:
        os.close(file)


class ShardWriter:
    """Packed tokens of one part, in order, to as many shards as they need."""

    def __init__(self, staging, part, width, shard_tokens):
        self.staging, self.part, self.width, self.shard_tokens = staging, part, width, shard_tokens
        self.tokens, self.shards, self.count, self.file, self.path = 0, 0, 0, None, None

    def write(self, packed):
        view = memoryview(packed)
        while view:
            if self.file is None:
                self.path = self.staging.file(shard_name(self.part, self.shards))
                self.file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            take = min(self.shard_tokens - self.count, len(view) // self.width)
            write_all(self.file, view[:take * self.width], HEADER_BYTES + self.count * self.width, self.path)
            view = view[take * self.width:]
            self.count += take
            self.tokens += take
            if self.count == self.shard_tokens:
                self.close()

    def close(self):
        """Ends the open shard by writing its header; the next token opens another one."""
        if self.file is not None:
            write_all(self.file, shard_header(self.width, self.count), 0, self.path)
            os.close(self.file)
            self.file, self.count, self.shards = None, 0, self.shards + 1


# --- the three ways ---------------------------------------------------------------------------------------------------

def part_counts(total, fraction):
    """How many of so many tokens go to each part."""
    counts = {"train": total - int(total * fraction), "val": int(total * fraction)}
    check_parts(counts, fraction)
    return counts


def check_parts(counts, fraction):
    """Either part must have a token to predict from and one to predict."""
    for part, count in counts.items():
        if count < 2:
            raise Fault(f"the {part} part would have {count} tokens with --val-fraction {fraction:g}, expected at least 2; "
                        "give more text or another fraction")


def byte_tasks(documents, shards):
    """(pieces, path, offset) for every stretch of tokens; shards: (path, tokens) of those that hold the corpus, in order."""
    stream = iter(documents)
    document, at = next(stream), 0
    for path, tokens in shards:
        offset, pieces, waiting = HEADER_BYTES, [], 0
        while tokens:
            take = min(tokens, PIECE - waiting, document.size + 1 - at)
            end = min(at + take, document.size)
            pieces.append(Piece(document.path, at, end, at + take > document.size))
            at, tokens, waiting = at + take, tokens - take, waiting + take
            if at > document.size:
                document, at = next(stream, None), 0
            if waiting == PIECE or not tokens:
                yield pieces, path, offset
                offset, pieces, waiting = offset + 2 * waiting, [], 0


def prepare_bytes(documents, staging, args):
    """Byte tokens: every place is known, so that processes write side by side. Returns tokens by part."""
    total = sum(document.size + 1 for document in documents)
    counts = part_counts(total, args.val_fraction)
    shards = []
    for part, count in counts.items():
        for number, first in enumerate(range(0, count, args.shard_tokens)):
            path, tokens = staging.file(shard_name(part, number)), min(args.shard_tokens, count - first)
            write_file(path, shard_header(2, tokens))
            shards.append((path, tokens))
    progress = Progress(total)
    for done in in_order(args.workers, place_bytes, byte_tasks(documents, shards)):
        progress.add(done)
    progress.end()
    return counts


def prepare_merged(documents, staging, args, tokenizer):
    """Tokens of a tokenizer with merges: encoded side by side, written in order. Returns tokens by part."""
    size = sum(document.size for document in documents)
    split = find_split(documents, size - int(size * args.val_fraction), tokenizer.splits)
    if not split:
        return prepare_whole(documents[0], staging, args, tokenizer)
    number, byte = split
    spans = {"train": [(document, 0, document.size) for document in documents[:number]] + [(documents[number], 0, byte)],
             "val": [(documents[number], byte, documents[number].size)] +
                    [(document, 0, document.size) for document in documents[number + 1:]]}
    progress = Progress(size)
    counts = {}
    for part, stretches in spans.items():
        writer = ShardWriter(staging, part, tokenizer.width, args.shard_tokens)
        piece_size = PIECE_MERGES if tokenizer.splits else size
        pieces = (piece for document, start, end in stretches
                  for piece in cut_document(document, start, end, piece_size, safe=True))
        tasks = ((pieces_, args.tokenizer, args.end_of_text) for pieces_ in bundle(pieces, PIECE_MERGES))
        for packed, done in in_order(args.workers, encode_pieces, tasks):
            writer.write(packed)
            progress.add(done)
        writer.close()
        counts[part] = writer.tokens
    progress.end()
    check_parts(counts, args.val_fraction)
    return counts


def prepare_whole(document, staging, args, tokenizer):
    """Tokens of a single text that may be cut nowhere: encoded in one go, and parted then. Returns tokens by part."""
    packed, _ = encode_pieces([Piece(document.path, 0, document.size, True)], args.tokenizer, args.end_of_text)
    counts, at = part_counts(len(packed) // tokenizer.width, args.val_fraction), 0
    for part, count in counts.items():
        writer = ShardWriter(staging, part, tokenizer.width, args.shard_tokens)
        writer.write(packed[at:at + count * tokenizer.width])
        writer.close()
        at += count * tokenizer.width
    return counts


class TokenStream:
    """Packed tokens as they come, handed on by number. counts_tokens: whether the bar shows tokens, else bytes of files."""

    def __init__(self, packed, tokenizer, progress, counts_tokens):
        self.packed, self.tokenizer, self.progress, self.counts_tokens = packed, tokenizer, progress, counts_tokens
        self.rest = memoryview(b"")
        self.ends_document = True  # what was handed on so far

    def more(self):
        """Whether there is a token still; then the rest begins with it."""
        while not self.rest:
            packed, size = next(self.packed, (None, 0))
            if packed is None:
                return False
            self.rest = memoryview(packed)
            self.progress.add(len(packed) // self.tokenizer.width if self.counts_tokens else size)
        return True

    def read(self, most):
        """Up to so many tokens in packs, until none is left."""
        width = self.tokenizer.width
        while most and self.more():
            pack = self.rest[:most * width]
            self.rest = self.rest[len(pack):]
            most -= len(pack) // width
            self.ends_document = int.from_bytes(pack[-width:], "little") == self.tokenizer.end_of_text
            yield pack

    def finish_document(self):
        """Drops tokens up to the end of a document that was handed on in part."""
        mark, width = self.tokenizer.pack([self.tokenizer.end_of_text]), self.tokenizer.width
        while not self.ends_document and self.more():
            data = bytes(self.rest)
            at = data.find(mark)
            while at >= 0 and at % width:  # the mark's bytes, but of two tokens
                at = data.find(mark, at + 1)
            self.ends_document = at >= 0
            self.rest = self.rest[at + width if at >= 0 else len(data):]

    def close(self):
        self.packed.close()


def prepare_set(files, staging, args, tokenizer):
    """The documents of a data set. Returns tokens by part."""
    data, limit = files.set, args.limit or 1 << 62
    progress = Progress(args.limit or files.size(), " tokens" if args.limit else "B")

    def stream(names):
        tasks = ((task, data.column, data.separator, args.tokenizer, args.end_of_text)
                 for name in names for task in files.tasks(name))
        return TokenStream(in_order(args.workers, sources.encode_task, tasks), tokenizer, progress, bool(args.limit))

    def write(part, packs):
        writer = ShardWriter(staging, part, tokenizer.width, args.shard_tokens)
        for pack in packs:
            writer.write(pack)
        writer.close()
        return writer.tokens

    train, counts = stream(files.names()), {}
    if data.validation == "tail":
        tokens = b"".join(train.read(limit))
        counts = part_counts(len(tokens) // tokenizer.width, args.val_fraction)
        write("train", [tokens[:counts["train"] * tokenizer.width]])
        write("val", [tokens[counts["train"] * tokenizer.width:]])
    else:
        most = int(args.limit * args.val_fraction) if args.limit else limit
        source = stream(["valid.txt"]) if data.validation == "file" else train
        counts["val"] = write("val", source.read(min(most, sources.VALIDATION_TOKENS)))
        train.finish_document()
        counts["train"] = write("train", train.read(limit - counts["val"]))
        source.close()
    train.close()
    progress.end()
    check_parts(counts, args.val_fraction)
    return counts


def find_documents(paths):
    documents = []
    for path in paths:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise Fault(f"--text {path}: is {kind}, expected a file of text")
        if not status.st_size:
            raise Fault(f"--text {path}: is empty, expected text")
        documents.append(Document(path, status.st_size, int(status.st_mtime)))
    return documents


def pack_tokenizer(tokenizer):
    """A tokenizer.bin (see tokenizer.h)."""
    merges = tokenizer.merges or []
    rule = RULE_UNKNOWN if tokenizer.merges is None else RULE_GPT2
    return b"".join([header(TOKENIZER, tokenizer.vocab, tokenizer.end_of_text, len(merges), rule),
                     *(bytes([len(text)]) + text for text in tokenizer.table),
                     *(struct.pack("<3i", *merge) for merge in merges)])


def write_builtin(path, size, seed):
    """The sentences of a grammar, as many whole ones as make `size` bytes."""
    with open(path, "w", encoding="ascii") as file:
        for sentence in Grammar(seed).text(seed):
            size -= file.write(sentence)
            if size <= 0:
                break


def prepare(args):
    tokenizer = open_tokenizer(args.tokenizer, args.end_of_text)
    builtin = args.text == ["builtin"]
    documents = find_documents(args.text) if args.text and not builtin else []
    staging = Staging(args.out, args.force)
    try:
        rate = None
        if args.dataset:
            files = sources.Files(args.dataset, args.downloads)
            counts = prepare_set(files, staging, args, tokenizer)
            corpus_sources = list(files.used.values())
        else:
            if builtin:
                path = staging.file("builtin.txt")
                write_builtin(path, args.builtin_bytes, args.seed)
                documents = find_documents([path])
                rate = Grammar(args.seed).entropy_rate() if args.tokenizer == "bytes" else None
                corpus_sources = [{"path": "builtin", "bytes": documents[0].size, "seed": args.seed}]
            else:
                corpus_sources = [{"path": path, "bytes": size, "modified": modified} for path, size, modified in documents]
            counts = prepare_merged(documents, staging, args, tokenizer) if tokenizer.encode else \
                prepare_bytes(documents, staging, args)
            if builtin:
                os.unlink(path)
        write_file(staging.file("tokenizer.bin"), pack_tokenizer(tokenizer))
        corpus = {"tokenizer": tokenizer.name, "vocab": tokenizer.vocab, "train_tokens": counts["train"],
                  "val_tokens": counts["val"], "entropy_rate": rate, "sources": corpus_sources}
        write_file(staging.file("corpus.json"), json.dumps(corpus, indent=1).encode() + b"\n")
        with signals(signal.SIG_IGN):  # from here on it is a matter of a moment, and should be all or nothing
            staging.publish()
    except BaseException:
        staging.discard()
        raise
    print(f"{args.out}: {counts['train']} training and {counts['val']} validation tokens, vocabulary {tokenizer.vocab}" +
          (f", entropy rate {rate:.4f} nats a token" if rate else ""))


def whole(least, most):
    def parse(text):
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"got {value}, expected {least} to {most}")
        return value
    return parse


def amount_of(text):
    """A number of tokens: 250000, 100M, 1.5B."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKMBG]?)", text)
    value = round(float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9}[match[2].upper()]) if match else 0
    if not 4 <= value < 1 << 60:
        raise argparse.ArgumentTypeError(f"got {text}, expected tokens from 4 on, as 250000, 100M or 1.5B")
    return value


def fraction_of(text):
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"got {value:g}, expected more than 0 and less than 1")
    return value


def parse_arguments(argv):
    sets = "".join(f"\n  {name:12} {one.about}" for name, one in sources.SETS.items())
    parser = argparse.ArgumentParser(description="Turns text, or a data set of the web, into the shards of tokens that "
                                     "train_gpt --data DIR reads.", epilog="data sets:" + sets,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("dataset", nargs="?", metavar="DATASET", help="one of those below, instead of --text")
    add("--text", nargs="+", metavar="FILE", help="text files, each one a document; or builtin: sentences "
        "of a random grammar whose entropy rate is known")
    add("--tokenizer", metavar="NAME", help="bytes, gpt2, a directory with vocab.bpe and encoder.json, or a tokenizer.json "
        "of Hugging Face (default: bytes for --text and shakespeare, else gpt2)")
    add("--out", metavar="DIR", help="where to write train_*.bin, val_*.bin, tokenizer.bin and corpus.json (default: "
        "runs/DATASET)")
    add("--limit", type=amount_of, metavar="N", help="of a data set take the first N tokens, as 100M (default: all)")
    add("--downloads", default="runs/downloads", metavar="DIR", help="a data set's files, in DIR/DATASET (default: "
        "%(default)s)")
    add("--val-fraction", type=fraction_of, default=0.1, metavar="F", help="part of the corpus for validation: the end of "
        "texts, the first documents of a data set, unless it has a part for that (default: %(default)s; of a data set at "
        f"most {sources.VALIDATION_TOKENS // 10**6}M tokens)")
    add("--shard-tokens", type=whole(2, SHARD_LIMIT), default=100_000_000, metavar="N", help="most tokens in a shard "
        "(default: %(default)s)")
    add("--end-of-text", metavar="TOKEN", help="the end-of-text token of a tokenizer.json (default: the usual ones are "
        "tried)")
    add("--workers", type=whole(1, 4096), default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1, metavar="N", help="processes (default: %(default)s)")
    add("--builtin-bytes", type=whole(1, 1 << 40), default=4_000_000, metavar="N", help="size of the builtin corpus "
        "(default: %(default)s)")
    add("--seed", type=whole(0, 2**63 - 1), default=1, metavar="N", help="of the builtin corpus (default: %(default)s)")
    add("--force", action="store_true", help="replace the corpus that --out holds")
    args = parser.parse_args(argv)
    if bool(args.dataset) == bool(args.text):
        parser.error("expected either a data set or --text FILE, got " + ("both" if args.text else "neither"))
    if args.dataset and args.dataset not in sources.SETS:
        parser.error(f"got the data set {args.dataset!r}, expected one of {', '.join(sources.SETS)}")
    if args.text and (args.limit or not args.out):
        parser.error("--limit is for data sets" if args.limit else "--text needs --out DIR")
    if args.dataset and not args.out:
        args.out = os.path.join("runs", args.dataset)
    if not args.tokenizer:
        args.tokenizer = sources.SETS[args.dataset].tokenizer if args.dataset else "bytes"
    return args


def stop(number, _frame):
    raise Stopped(signal.Signals(number).name)


@contextlib.contextmanager
def signals(handler):
    """Ctrl-C and SIGTERM go to the handler meanwhile."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def main(argv=None):
    args = parse_arguments(argv)
    try:
        with signals(stop):
            prepare(args)
    except Fault as fault:
        print(f"prepare.py: {fault}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"prepare.py: {error.filename or args.out}: {error.strerror}", file=sys.stderr)
        return 1
    except Stopped as stopped:
        print(f"prepare.py: stopped by {stopped}; {args.out} is as it was", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
