"""Data sets of the web for prepare.py: where their files are, and how a file becomes documents.

A data set is files: of text in which a line separates the documents, or of Parquet with a column of them. They come from the
URLs in SETS into a folder of downloads, one at a time as they are needed, and are used again by every later run; a
file that was put there by hand is as good. Parquet is read by pyarrow, the rest needs the standard library alone.

A task is a piece of a file: a stretch of text that ends with a document, or a row group. Processes turn tasks into tokens,
each document followed by the end-of-text token.
"""
import array
import collections
import functools
import glob
import hashlib
import json
import mmap
import os
import sys
import urllib.parse

from download import Fault, Remote, Unreachable, download, read_url
from vocabulary import open_tokenizer

HUB = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")  # the variable that Hugging Face's programs know
TASK = 1 << 20  # bytes of text, about
ANEW = "remove it to download it anew"

# urls: (name of the file, URL, SHA-256 or None). listing: (repository, folder) of Hugging Face, all of whose Parquet files
# are meant, in the order of their names; column: theirs with the documents. separator: what parts documents of a text.
# validation: which part it is: "tail", the end of the one text; "file", that named valid.txt; "head", the first documents.
DataSet = collections.namedtuple("DataSet", "about tokenizer validation urls listing column separator",
                                 defaults=((), None, None, None))

SETS = {
    "shakespeare": DataSet(
        "his plays in one text, 1.1 MB", "bytes", "tail",
        urls=(("input.txt", "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
               "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),)),
    "tinystories": DataSet(
        "short stories of few words by GPT-4, 2.2 GB", "gpt2", "file", separator="<|endoftext|>",
        urls=(("train.txt", HUB + "/datasets/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-train.txt", None),
              ("valid.txt", HUB + "/datasets/roneneldan/TinyStories/resolve/main/TinyStoriesV2-GPT4-valid.txt", None))),
    "fineweb": DataSet("web pages, a sample of 10 billion tokens, 31 GB", "gpt2", "head",
                       listing=("HuggingFaceFW/fineweb", "sample/10BT"), column="text"),
    "fineweb-edu": DataSet("the same, those that teach, 29 GB", "gpt2", "head",
                           listing=("HuggingFaceFW/fineweb-edu", "sample/10BT"), column="text"),
    "openwebtext": DataSet("GPT-2's kind of web pages, 9 billion tokens, 24 GB", "gpt2", "head",
                           listing=("Skylion007/openwebtext", "plain_text"), column="text"),
}
VALIDATION_TOKENS = 100_000_000  # of a set whose first documents validate, at most: as many as in llm.c's first shard

# A piece of a file for one process: bytes [first, last) of text, or the row group `first`. size: its share of the file.
Task = collections.namedtuple("Task", "path first last size")


def import_pyarrow(name):
    try:
        import pyarrow.parquet
    except ImportError:
        raise Fault(f"{name} comes as Parquet, which needs the Python package pyarrow, and {sys.executable} has it not: "
                    f"{os.path.basename(sys.executable)} -m pip install pyarrow") from None
    return pyarrow


# --- files ------------------------------------------------------------------------------------------------------------

def offline(reason, url, what, folder):
    return Fault(f"{url}: cannot be reached ({reason}); offline, put {what} into {folder} and run this again")


def sha256_of(path):
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            total.update(piece)
    return total.hexdigest()


class Files:
    """The files of a data set, in order: their names, and each of them once it is here. `used` says what was read."""

    def __init__(self, name, folder):
        self.name, self.set, self.folder, self.used = name, SETS[name], os.path.join(folder, name), {}
        if self.set.listing:
            import_pyarrow(name)
            self.remotes = self.list_remotes()
        else:
            self.remotes = {file: Remote(url, None, sha256) for file, url, sha256 in self.set.urls}
            for file in self.remotes:
                self.bring(file)

    def names(self):
        """Of the files with training documents."""
        return [name for name in self.remotes if name != "valid.txt"]

    def list_remotes(self):
        """name -> Remote of a listing, sorted; where there is no way to it, of the files that are here."""
        repository, folder = self.set.listing
        url = f"{HUB}/api/datasets/{repository}/tree/main/{folder}"
        try:
            entries = self.read_listing(url)
        except Unreachable as reason:
            here = sorted(map(os.path.basename, glob.glob(os.path.join(glob.escape(self.folder), "*.parquet"))))
            if not here:
                raise offline(reason, url, f"{self.name}'s files, {folder}/*.parquet,", self.folder) from None
            print(f"prepare.py: {url}: cannot be reached ({reason}); taking the {len(here)} files in {self.folder} for the "
                  "whole set", file=sys.stderr)
            return {name: Remote(None) for name in here}
        remotes = {}
        for entry in sorted(entries, key=lambda entry: entry["path"]):
            name = os.path.basename(entry["path"])
            if name.endswith(".parquet"):
                place = urllib.parse.quote(entry["path"])
                remotes[name] = Remote(f"{HUB}/datasets/{repository}/resolve/main/{place}", entry.get("size"),
                                       (entry.get("lfs") or {}).get("oid"))
        if not remotes:
            raise Fault(f"{url}: lists no Parquet file, {self.name} may have moved; expected {folder}/*.parquet")
        return remotes

    def read_listing(self, url):
        """All entries, page after page."""
        entries, first = [], url
        while url:
            text, headers = read_url(url)
            try:
                page = json.loads(text)
                entries += [{"path": str(entry["path"]), **entry} for entry in page]
            except (ValueError, TypeError, KeyError):
                raise Fault(f"{first}: expected a list of files in JSON, got {text[:60]!r}") from None
            following = [link for link in headers.get("Link", "").split(",") if 'rel="next"' in link]
            url = following[0].partition("<")[2].partition(">")[0] if following else None
        return entries

    def bring(self, name):
        """The path of a file, which is downloaded unless it is here."""
        remote, path = self.remotes[name], os.path.join(self.folder, name)
        here = os.path.exists(path)
        if not here:
            try:
                download(remote, path)
            except Unreachable as reason:
                raise offline(reason, remote.url, f"that file, as {name},", self.folder) from None
        size = os.path.getsize(path)
        if remote.size is not None and size != remote.size:
            raise Fault(f"{path}: has {size} bytes, expected {remote.size} as in {remote.url}; {ANEW}")
        if here and remote.sha256 and not self.set.listing and sha256_of(path) != remote.sha256:
            raise Fault(f"{path}: has not the SHA-256 of {remote.url}, {remote.sha256}; {ANEW}")
        self.used[name] = {"path": path, "bytes": size, "url": remote.url}
        return path

    def tasks(self, name):
        """The pieces of a file, in order."""
        path = self.bring(name)
        if self.set.listing:
            return row_groups(path)
        return stretches(path, self.set.separator) if self.set.separator else [Task(path, 0, None, os.path.getsize(path))]

    def size(self):
        """Bytes of the files with training documents: as listed, else of those that are here, which text is by now."""
        paths = {name: os.path.join(self.folder, name) for name in self.names()}
        return sum(self.remotes[name].size or os.path.getsize(path) for name, path in paths.items())


# --- pieces -----------------------------------------------------------------------------------------------------------

def stretches(path, separator):
    """Of a text: each ends with a separator, so that no document is cut."""
    size, mark, start = os.path.getsize(path), separator.encode(), 0
    if not size:
        raise Fault(f"{path}: is empty, expected documents separated by {separator}")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        while start < size:
            found = text.find(mark, min(start + TASK, size))
            end = size if found < 0 else found + len(mark)
            yield Task(path, start, end, end - start)
            start = end


@functools.lru_cache(maxsize=2)
def open_parquet(path):
    import pyarrow.parquet
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise Fault(f"{path}: cannot be read as Parquet: {str(error).splitlines()[0]}; {ANEW}") from None


def row_groups(path):
    metadata, size = open_parquet(path).metadata, os.path.getsize(path)
    for group in range(metadata.num_row_groups):
        yield Task(path, group, None, size * metadata.row_group(group).num_rows // max(metadata.num_rows, 1))


def read_texts(task, column, separator):
    """The documents of a task, as text."""
    if column:
        file = open_parquet(task.path)
        names = file.schema_arrow.names
        if column not in names:
            raise Fault(f"{task.path}: has no column {column}, only {', '.join(names)}")
        try:
            texts = file.read_row_group(task.first, columns=[column]).column(0).to_pylist()
        except Exception as error:  # pyarrow's own and, of a damaged file, any other
            raise Fault(f"{task.path}: row group {task.first} cannot be read: {str(error).splitlines()[0]}") from None
        return [text for text in texts if text]
    with open(task.path, "rb") as file:
        file.seek(task.first)
        data = file.read() if task.last is None else file.read(task.last - task.first)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start
        raise Fault(f"{task.path}: byte {task.first + at} is 0x{data[at]:02x}, expected UTF-8 text") from None
    if not separator:
        return [text]
    return [part for part in map(str.strip, text.split(separator)) if part]


def encode_task(task, column, separator, spec, end_of_text):
    """The packed tokens of a task's documents, and its size: what a process does."""
    tokenizer = open_tokenizer(spec, end_of_text)
    encode = tokenizer.encode or (lambda text: text.encode())
    tokens = array.array("H" if tokenizer.width == 2 else "I")
    for text in read_texts(task, column, separator):
        tokens.extend(encode(text))
        tokens.append(tokenizer.end_of_text)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes(), task.size
