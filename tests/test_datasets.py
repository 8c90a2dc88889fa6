#!/usr/bin/env python3
"""The data sets of prepare.py, against a server on this machine: downloads that break, resume, are wrong or are not there;
documents and parts of the shards; sentences for whoever is offline. And shards as other programs write them: each layout
trains as it is, with the same losses.
"""
import array
import contextlib
import hashlib
import http.server
import io
import json
import os
import resource
import shutil
import struct
import sys
import tempfile
import threading

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "tests"), os.path.join(ROOT, "data")]
import download  # noqa: E402
import prepare  # noqa: E402
import sources  # noqa: E402
import vocabulary  # noqa: E402
from check import check, end, skip, test  # noqa: E402
from progress import Progress  # noqa: E402
from trainer_runs import TINY, log_values, train  # noqa: E402

FOLDER = tempfile.mkdtemp(prefix="flashgpt-datasets-")
download.PAUSE = 0.01
download.TIMEOUT = 5
EOT = 256


# --- a server that misbehaves as it is told ---------------------------------------------------------------------------

class Server:
    """files: path -> bytes. plans: path -> what its next requests meet: ("cut", n) gives n bytes and hangs up, ("status", s)
    answers so, "whole" knows no ranges. hub: paths that one is sent on to, with size and sum in the headers."""

    def __init__(self):
        self.files, self.plans, self.hub, self.asked, self.links = {}, {}, {}, [], {}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                outer.answer(self)

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.handle_error = lambda *_: None  # who hung up on it is no news here
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()

    def answer(self, request):
        path, wanted = request.path, request.headers.get("Range")
        self.asked.append((path, wanted))
        if path in self.hub:
            data = self.files[self.hub[path]]
            return self.reply(request, 302, b"", {"Location": self.hub[path], "X-Linked-Size": len(data),
                                                  "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"'})
        plan = self.plans.get(path) and self.plans[path].pop(0)
        if plan and plan[0] == "status":
            return self.reply(request, plan[1], b"")
        if path not in self.files:
            return self.reply(request, 404, b"")
        data = self.files[path]
        headers = {"ETag": f'"{len(data)}"', **self.links.get(path, {})}
        first = int(wanted[6:-1]) if wanted and plan != "whole" else 0
        if first and first >= len(data):
            return self.reply(request, 416, b"")
        if wanted and plan != "whole":
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        body = data[first:]
        cut = plan and plan[0] == "cut"
        self.reply(request, 206 if "Content-Range" in headers else 200, body[:plan[1]] if cut else body,
                   {**headers, "Content-Length": len(body)})
        if cut:
            request.close_connection = True
        return None

    @staticmethod
    def reply(request, status, body, headers=None):
        request.send_response(status)
        for name, value in {"Content-Length": len(body), **(headers or {})}.items():
            request.send_header(name, str(value))
        request.end_headers()
        request.wfile.write(body)


SERVER = Server()


def path_of(*names):
    return os.path.join(FOLDER, *names)


def sum_of(data):
    return hashlib.sha256(data).hexdigest()


def read(path):
    with open(path, "rb") as file:
        return file.read()


def write(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
    return path


def fetch(path, name, *known):
    """Downloads a path of the server; returns (the file's bytes or None, the sentence or "", ranges that were asked for)."""
    del SERVER.asked[:]
    said, target = "", path_of("got", name)
    try:
        download.download(download.Remote(SERVER.url + path, *known), target)
    except download.Fault as fault:
        said = str(fault)
    return read(target) if os.path.exists(target) else None, said, [wanted for _, wanted in SERVER.asked]


# --- downloads --------------------------------------------------------------------------------------------------------

def test_downloads():
    data = bytes(range(256)) * 4000
    SERVER.files["/big"] = data
    with test("download: a file comes whole, once; then it is used as it is"):
        got, said, asked = fetch("/big", "plain", len(data), sum_of(data))
        check(got == data and not said and asked == [None], said, asked)
        check(fetch("/big", "plain")[2] == [], "it was asked for again")
        check(os.listdir(path_of("got")) == ["plain"], os.listdir(path_of("got")))
    with test("download: a connection that is cut, three times, is asked for the rest alone"):
        SERVER.plans["/big"] = [("cut", 1000), ("cut", 70000), ("status", 503), ("cut", 1)]
        got, said, asked = fetch("/big", "cut")
        check(got == data, said)
        check(asked == [None, "bytes=1000-", "bytes=71000-", "bytes=71000-", "bytes=71001-"], asked)
    with test("download: a later run goes on where a known sum will tell; without one it begins anew"):
        for known, wanted in (((len(data), sum_of(data)), ["bytes=5000-"]), ((len(data),), ["bytes=5000-", None])):
            write(path_of("got", "later.part"), data[:5000])
            got, said, asked = fetch("/big", "later", *known)
            check(got == data and asked == wanted, said, asked)
            os.unlink(path_of("got", "later"))
        write(path_of("got", "later.part"), data)
        got, said, asked = fetch("/big", "later", len(data), sum_of(data))
        check(got == data and asked == [], "the whole was there:", said, asked)
    with test("download: a server without ranges is read from the start again"):
        SERVER.plans["/big"] = [("cut", 1000), "whole"]
        got, said, asked = fetch("/big", "whole")
        check(got == data and asked == [None, "bytes=1000-"], said, asked)
    with test("download: a part of another file, longer than this one, is dropped"):
        write(path_of("got", "longer.part"), b"x" * (len(data) + 5))
        got, said, asked = fetch("/big", "longer", None, sum_of(data))
        check(got == data and asked == [f"bytes={len(data) + 5}-", None], said, asked)
    with test("download: a wrong sum drops the file and names both sums"):
        got, said, _ = fetch("/big", "sum", len(data), "0" * 64)
        check(got is None and sum_of(data) in said and "0" * 64 in said and "\n" not in said, said)
        check("sum.part" not in os.listdir(path_of("got")), os.listdir(path_of("got")))
        write(path_of("got", "mixed.part"), b"y" * 1000)
        got, said, _ = fetch("/big", "mixed", len(data), sum_of(data))
        check(got is None and "SHA-256" in said, "the start of another file passed:", said)
    with test("download: a wrong size is said before anything comes"):
        got, said, _ = fetch("/big", "size", 17)
        check(got is None and str(len(data)) in said and "17" in said, said)
    with test("download: 404 is one sentence at the first answer; a server that stays broken is given up, the part is kept"):
        got, said, asked = fetch("/none", "none")
        check(got is None and "404" in said and SERVER.url + "/none" in said and len(asked) == 1, said, asked)
        SERVER.plans["/big"] = [("cut", 3000)] + [("status", 500)] * 20
        got, said, asked = fetch("/big", "stuck")
        check(got is None and "500" in said and "stuck.part" in said and len(asked) < 10, said, asked)
        check(read(path_of("got", "stuck.part")) == data[:3000], "the part is not what came")
        SERVER.plans["/big"] = []
    with test("download: where one is sent on, size and sum come from the headers on the way"):
        SERVER.hub["/resolve/big"] = "/big"
        SERVER.plans["/big"] = [("cut", 2000)]
        got, said, asked = fetch("/resolve/big", "linked")
        check(got == data and asked == [None, None, "bytes=2000-", "bytes=2000-"], said, asked)
        write(path_of("got", "linked2.part"), b"z" * 400)
        got, said, _ = fetch("/resolve/big", "linked2")
        check(got is None and "SHA-256" in said, "the start of another file passed:", said)
    with test("download: two at once: the second is refused; a full disk is named"):
        part = download.Part(path_of("got", "twice.part"))
        got, said, _ = fetch("/big", "twice")
        part.close()
        check("another process" in said, said)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100000, limits[1]))
        try:
            got, said, _ = fetch("/big", "full")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        check(got is None and "full.part: cannot write at byte 100000: File too large" in said, said)
    with test("download.py: the command"):
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = download.main(["--to", path_of("command"), SERVER.url + "/big", SERVER.url + "/none"])
        check(status == 1 and read(path_of("command", "big")) == data, said.getvalue())
        check("404" in said.getvalue().splitlines()[1], said.getvalue())


# --- data sets --------------------------------------------------------------------------------------------------------

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
def standing_in(**sets):
    """The server's sets in place of the web's."""
    before, hub = dict(sources.SETS), sources.HUB
    sources.SETS.update(sets)
    sources.HUB = SERVER.url
    try:
        yield
    finally:
        sources.SETS.clear()
        sources.SETS.update(before)
        sources.HUB = hub


def tokens_of(out, part):
    """The tokens of a part's shards, in order, by the words of shards.h."""
    tokens = []
    for name in sorted(os.listdir(out)):
        if name.startswith(part + "_"):
            data = read(os.path.join(out, name))
            magic, version, count = struct.unpack_from("<3i", data)
            check((magic, version, len(data)) == (20240520, 1, 1024 + 2 * count), name, magic, version, count, len(data))
            tokens += array.array("H", data[1024:])
    return tokens


def documents_of(tokens):
    """Texts, each ended by end of text; a last one that is not ended too."""
    out, text = [], []
    for token in tokens:
        if token == EOT:
            out.append(bytes(text).decode())
            text = []
        else:
            text.append(token)
    return out + ([bytes(text).decode()] if text else [])


def test_stream():
    with test("stream: tokens are handed on by number over packs; the rest of a document is dropped, however long"):
        tokenizer = vocabulary.open_tokenizer("bytes")
        packs = [[1, 2, 3, EOT], [4], [5, 1, 2], [6, 1, EOT, 7], [8, EOT]]  # 5 and 1 make end of text's bytes, but askew
        stream = prepare.TokenStream(((tokenizer.pack(tokens), 1) for tokens in packs), tokenizer, Progress(0), True)

        def read(most):
            return [*array.array("H", b"".join(map(bytes, stream.read(most))))]

        check(read(3) == [1, 2, 3], "not the first three")
        stream.finish_document()
        check(read(1) == [4], "not the start of the second document")
        stream.finish_document()
        check(read(2) == [7, 8], "not the start of the third document")
        check(read(9) == [EOT] and read(1) == [], "not the end")
        stream.finish_document()


def test_text_sets():
    play = "".join(f"Line {i} of the play.\n" for i in range(900)).encode()
    SERVER.files["/input.txt"] = play
    one = sources.DataSet("", "bytes", "tail", urls=(("input.txt", SERVER.url + "/input.txt", sum_of(play)),))
    stories = [f"Story {i} is \u00e9 long.\n\nIt has {i % 7} parts." + " And more." * (i % 50) for i in range(400)]
    SERVER.files["/train.txt"] = "\n<|endoftext|>\n".join(stories).encode()
    shouted = [story.upper() for story in stories[:90]]
    SERVER.files["/valid.txt"] = "\n<|endoftext|>\n".join(shouted).encode() + b"\n<|endoftext|>"
    many = sources.DataSet("", "bytes", "file", separator="<|endoftext|>",
                           urls=tuple((name, f"{SERVER.url}/{name}", None) for name in ("train.txt", "valid.txt")))
    with standing_in(shakespeare=one, tinystories=many):
        with test("shakespeare: the shards are those of the same file by --text"):
            status, said = call("shakespeare", "--out", path_of("sh"), "--downloads", path_of("dl"))
            check(status == 0, said)
            file = path_of("dl", "shakespeare", "input.txt")
            call("--text", file, "--out", path_of("sh_text"))
            for part in ("train", "val"):
                name = f"{part}_000000.bin"
                check(read(path_of("sh", name)) == read(path_of("sh_text", name)), name, "differs")
            corpus = json.loads(read(path_of("sh", "corpus.json")))
            check(corpus["sources"] == [{"path": file, "bytes": len(play), "url": SERVER.url + "/input.txt"}], corpus)
        with test("shakespeare: --limit takes that many tokens from the start; a file of another sum is refused"):
            status, said = call("shakespeare", "--out", path_of("sh2"), "--downloads", path_of("dl"), "--limit", "1K")
            tokens = tokens_of(path_of("sh2"), "train") + tokens_of(path_of("sh2"), "val")
            check(status == 0 and bytes(tokens) == play[:1000], said, len(tokens))
            write(file, play[:-1] + b"!")
            status, said = call("shakespeare", "--out", path_of("sh3"), "--downloads", path_of("dl"))
            check(status == 1 and "SHA-256" in said and file in said and said.count("\n") == 1, said)
            check(not os.path.exists(path_of("sh3")), "it left an output")
        with test("tinystories: every document, blanks at its ends off, end of text behind it; its own validation part"):
            for workers, task in ((1, 1 << 20), (1, 300), (2, 999)):
                before, sources.TASK = sources.TASK, task
                status, said = call("tinystories", "--out", path_of("ts"), "--downloads", path_of("dl"), "--force",
                                    "--workers", workers, "--shard-tokens", 5000)
                sources.TASK = before
                check(status == 0, said)
                check(documents_of(tokens_of(path_of("ts"), "train")) == stories, workers, task, ": not the stories")
                check(documents_of(tokens_of(path_of("ts"), "val")) == shouted, "validation has other stories")
                check(tokens_of(path_of("ts"), "train")[-1] == EOT, "no end of text at the end")
        with test("tinystories: --limit shares the tokens out, and --val-fraction says how"):
            status, said = call("tinystories", "--out", path_of("ts2"), "--downloads", path_of("dl"), "--limit", 4000,
                                "--val-fraction", "0.25")
            lengths = [len(tokens_of(path_of("ts2"), part)) for part in ("train", "val")]
            check(status == 0 and lengths == [3000, 1000], said, lengths)
            check(tokens_of(path_of("ts2"), "train") == tokens_of(path_of("ts"), "train")[:3000], "not the first tokens")
        with test("tinystories: text that is no UTF-8 is named with its byte"):
            write(path_of("dl", "tinystories", "train.txt"), b"good <|endoftext|> b\xe9d <|endoftext|>" * 30)
            status, said = call("tinystories", "--out", path_of("ts3"), "--downloads", path_of("dl"))
            check(status == 1 and "train.txt: byte 20 is 0xe9" in said and said.count("\n") == 1, said)


def listing(folder, files):
    """Puts Parquet files behind the server's hub: listed on two pages, each sent on to its bytes."""
    entries = [{"type": "directory", "path": folder + "/more", "size": 0, "oid": "0"}]
    for name, data in files.items():
        stored = f"/store/{sum_of(data)}"
        SERVER.files[stored] = data
        SERVER.hub[f"/datasets/some/web/resolve/main/{folder}/{name}"] = stored
        entries.append({"type": "file", "path": f"{folder}/{name}", "size": len(data), "oid": "0" * 40,
                        "lfs": {"oid": sum_of(data), "size": len(data), "pointerSize": 134}})
    entries.reverse()
    url = f"/api/datasets/some/web/tree/main/{folder}"
    SERVER.files[url], SERVER.files[url + "?page=2"] = (json.dumps(half).encode() for half in (entries[:2], entries[2:]))
    SERVER.links[url] = {"Link": f'<{SERVER.url}{url}?page=2>; rel="next"'}


def test_parquet_sets():
    web = sources.DataSet("", "bytes", "head", listing=("some/web", "sample/1"), column="text")
    with test("fineweb: without pyarrow, one sentence before anything is downloaded"):
        hidden = {name: sys.modules.get(name) for name in ("pyarrow", "pyarrow.parquet")}
        sys.modules.update(dict.fromkeys(hidden))
        try:
            status, said = call("fineweb", "--tokenizer", "bytes", "--out", path_of("fw0"), "--downloads", path_of("dl"))
        finally:
            for name, module in hidden.items():
                sys.modules.pop(name)
                if module:
                    sys.modules[name] = module
        check(status == 1 and "pyarrow" in said and "-m pip install pyarrow" in said and said.count("\n") == 1, status, said)
        check(not os.path.exists(path_of("fw0")), "it left an output")
    with test("fineweb: documents of row groups and files in order, validation first, only the files that --limit needs"):
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            skip("pyarrow is not installed")
        pages = [f"Page {i}: \u4e2d{'x' * (i % 90)}" for i in range(600)]
        files = {}
        for number in range(3):
            table = pyarrow.table({"id": list(range(200)), "text": [*pages[200 * number:200 * number + 200]]})
            sink = io.BytesIO()
            pyarrow.parquet.write_table(table, sink, row_group_size=30)
            files[f"00{number}.parquet"] = sink.getvalue()
        listing("sample/1", files)
        SERVER.plans[f"/store/{sum_of(files['001.parquet'])}"] = [("cut", 500)]
        everything = [token for page in pages for token in [*page.encode(), EOT]]
        with standing_in(fineweb=web):
            del SERVER.asked[:]
            status, said = call("fineweb", "--out", path_of("fw1"), "--downloads", path_of("dl"), "--limit", 5000,
                                "--workers", 1)
            check(status == 0, said)
            asked = {path.rpartition("/")[2] for path, _ in SERVER.asked if "/resolve/" in path}
            check(asked == {"000.parquet"}, "downloaded", asked)
            val, rest = tokens_of(path_of("fw1"), "val"), tokens_of(path_of("fw1"), "train")
            check(val == everything[:500] and len(rest) == 4500, len(val), len(rest))
            dropped = everything.index(EOT, 499) + 1  # the document that the validation part ends in
            check(rest == everything[dropped:dropped + 4500], "training goes on elsewhere")
            before, sources.VALIDATION_TOKENS = sources.VALIDATION_TOKENS, 700
            for workers in (1, 2):
                status, said = call("fineweb", "--out", path_of("fw2"), "--downloads", path_of("dl"), "--workers", workers,
                                    "--force")
                check(status == 0, said)
                val, rest = tokens_of(path_of("fw2"), "val"), tokens_of(path_of("fw2"), "train")
                dropped = everything.index(EOT, 699) + 1
                check(val == everything[:700] and rest == everything[dropped:], "workers", workers, len(val), len(rest))
            sources.VALIDATION_TOKENS = before
            for name, data in files.items():
                check(read(path_of("dl", "fineweb", name)) == data, name, "differs")
            with open(path_of("dl", "fineweb", "002.parquet"), "r+b") as file:
                file.truncate(100)
            status, said = call("fineweb", "--out", path_of("fw3"), "--downloads", path_of("dl"))
            check(status == 1 and "002.parquet: has 100 bytes" in said and said.count("\n") == 1, said)
    with test("fineweb: a listing that is none, or without Parquet, is a sentence"):
        if "pyarrow" not in sys.modules:
            skip("pyarrow is not installed")
        url = "/api/datasets/some/web/tree/main/sample/1"
        SERVER.links.pop(url, None)
        for answer, words in ((b"<html>", "a list of files in JSON"), (b"[]", "lists no Parquet"), (b'[{"a": 1}]', "JSON")):
            SERVER.files[url] = answer
            with standing_in(fineweb=web):
                status, said = call("fineweb", "--out", path_of("fw4"), "--downloads", path_of("dl"))
            check(status == 1 and words in said and said.count("\n") == 1, answer, said)


def test_offline():
    closed = Server()
    closed.close()
    away = {"shakespeare": sources.DataSet("", "bytes", "tail", urls=(("input.txt", closed.url + "/input.txt", None),)),
            "fineweb": sources.DataSet("", "bytes", "head", listing=("some/web", "sample/1"), column="text")}
    with test("offline: one sentence, at once, that says what to put where; then that is enough"):
        with standing_in(**away):
            folder = path_of("off", "shakespeare")
            status, said = call("shakespeare", "--out", path_of("off1"), "--downloads", path_of("off"))
            check(status == 1 and said.count("\n") == 1, said)
            check(closed.url in said and folder in said and "input.txt" in said, said)
            check(not os.path.exists(path_of("off1")), "it left an output")
            write(os.path.join(folder, "input.txt"), b"some text\n" * 30)
            status, said = call("shakespeare", "--out", path_of("off1"), "--downloads", path_of("off"))
            check(status == 0 and tokens_of(path_of("off1"), "train"), said)
    with test("offline: Parquet files that are here are taken, and it is said that they are"):
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            skip("pyarrow is not installed")
        with standing_in(**away):
            sources.HUB = closed.url
            folder = path_of("off", "fineweb")
            status, said = call("fineweb", "--out", path_of("off2"), "--downloads", path_of("off"))
            check(status == 1 and folder in said and "sample/1/*.parquet" in said and said.count("\n") == 1, said)
            os.makedirs(folder, exist_ok=True)
            pyarrow.parquet.write_table(pyarrow.table({"text": ["a page"] * 90}), os.path.join(folder, "x.parquet"))
            status, said = call("fineweb", "--out", path_of("off2"), "--downloads", path_of("off"), "--limit", 400)
            check(status == 0 and "1 files in " + folder in said, said)
            pyarrow.parquet.write_table(pyarrow.table({"words": ["a page"]}), os.path.join(folder, "x.parquet"))
            for data, words in ((None, "has no column text, only words"), (b"PAR1nothing", "cannot be read as Parquet")):
                if data:
                    write(os.path.join(folder, "x.parquet"), data)
                sources.open_parquet.cache_clear()
                status, said = call("fineweb", "--out", path_of("off3"), "--downloads", path_of("off"), "--workers", 1)
                check(status == 1 and words in said and "Traceback" not in said, said)
    with test("refusals: neither or both of data set and text, an unknown set, a bad limit"):
        for arguments, words in (
                ([], "got neither"), (["shakespeare", "--text", "x"], "got both"), (["novels"], "'novels'"),
                (["shakespeare", "--limit", "many"], "got many"), (["shakespeare", "--limit", "3"], "from 4"),
                (["--text", "x", "--limit", "9"], "for data sets"), (["--text", "x"], "--out")):
            status, said = call(*arguments)
            check(status == 2 and words in said, arguments, status, said)


# --- shards of other programs -----------------------------------------------------------------------------------------

def llmc_header(magic, version, count):
    return struct.pack("<256i", magic, version, count, *[0] * 253)


def write_layouts(folder, tokens, validation):
    """name -> folder with the same tokens as each program leaves them."""
    def pack(code, values):
        return array.array(code, values).tobytes()

    sixteen = [llmc_header(20240520, 1, len(part)) + pack("H", part) for part in (tokens, validation)]
    wide = [llmc_header(20240801, 7, len(part)) + pack("I", part) for part in (tokens, validation)]
    bare = [pack("H", part) for part in (tokens, validation)]
    layouts = {
        "ours": ("train_000000.bin", "val_000000.bin", sixteen),
        "llm.c, its small sets": ("tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin", sixteen),
        "llm.c, FineWeb": ("edu_fineweb_train_000001.bin", "edu_fineweb_val_000000.bin", sixteen),
        "llm.c, uint32": ("edu_fineweb_train_000001.bin", "edu_fineweb_val_000000.bin", wide),
        "nanoGPT": ("train.bin", "val.bin", bare),
        "modded-nanogpt": ("fineweb_train_000001.bin", "fineweb_val_000000.bin", sixteen),
    }
    for name, (first, second, parts) in layouts.items():
        for file, data in zip((first, second), parts):
            write(os.path.join(folder, name, file), data)
    return {name: os.path.join(folder, name) for name in layouts}


def test_layouts():
    tokens = [(i * i + i // 7) % 97 for i in range(3000)]
    folders = write_layouts(path_of("layouts"), tokens, tokens[:700])
    options = [*TINY, "--vocab", 97, "--steps", 3, "--eval-every", 3, "--device", "cpu", "--print-every", 0]
    wanted = None
    for name, folder in folders.items():
        with test(f"layouts: {name}: --data takes the folder as it is, and its losses are those of the others"):
            run = path_of("runs", name.replace(" ", "_"))
            status, out, err = train(*options, "--data", folder, "--out", run)
            check(status == 0 and "train 3000 tokens in 1 shard" in out, out, err)
            values = log_values(run)
            wanted = wanted or values
            check(values == wanted and len(values) >= 3, values, wanted)
    with test("layouts: where a folder holds more than one layout, ours is read; globs read any"):
        shutil.copy(os.path.join(folders["nanoGPT"], "train.bin"), folders["ours"])
        status, out, err = train(*options, "--data", folders["ours"])
        check(status == 0 and "train 3000 tokens in 1 shard" in out, out, err)
        status, out, err = train(*options, "--train", folders["nanoGPT"] + "/train.bin", "--val",
                                 folders["llm.c, FineWeb"] + "/*_val_*.bin")
        check(status == 0 and "val   700 tokens in 1 shard" in out, out, err)
    with test("layouts: a folder without shards says which names were looked for"):
        os.makedirs(path_of("bare"), exist_ok=True)
        status, _, err = train(*options, "--data", path_of("bare"))
        check(status == 1 and "train_*.bin" in err and "train.bin" in err and err.count("\n") == 1, err)


def main():
    try:
        test_downloads()
        test_stream()
        test_text_sets()
        test_parquet_sets()
        test_offline()
        test_layouts()
    finally:
        SERVER.close()
        shutil.rmtree(FOLDER, ignore_errors=True)
    end()


if __name__ == "__main__":
    main()
