#!/usr/bin/env python3
"""Files from the web: whole, checked, and gone on with where a connection broke.

    python3 data/download.py --to DIR URL...

What has arrived of FILE lies in FILE.part. Where a connection breaks, the next one is asked for the rest alone; so is that
of a later run, where the file's SHA-256 is known and will tell whether the two parts belong together. Only a file that is
whole and right gets its name. The sum is what the caller knows, else what the server says: Hugging Face names size and sum
of a large file in the headers that send one on to where it is stored.
"""
import argparse
import collections
import contextlib
import fcntl
import hashlib
import http.client
import os
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from progress import Progress  # noqa: E402
from vocabulary import Fault  # noqa: E402

# A file of the web: its URL, and size and SHA-256 where they are known.
Remote = collections.namedtuple("Remote", "url size sha256", defaults=(None, None))

CHUNK = 1 << 20
TIMEOUT = 30   # seconds without a byte
TRIES = 5      # connections in a row that bring nothing
PAUSE = 1.0    # seconds before the second of them; twice as long before each further one


class Broken(Exception):
    """A connection ended early, or a server cannot answer just now: worth another try."""


class Beyond(Broken):
    """The server has no bytes from where on it was asked."""


class Unreachable(Exception):
    """There is no way to the server at all."""


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirections and keeps what they say of the file."""

    def __init__(self):
        self.linked = {}

    def redirect_request(self, request, file, code, message, headers, url):
        self.linked.update({key.lower(): value for key, value in headers.items() if key.lower().startswith("x-linked-")})
        return super().redirect_request(request, file, code, message, headers, url)


def open_url(url, **headers):
    """(response, what redirections said of the file). Raises Unreachable, Broken or Fault."""
    redirects = Redirects()
    request = urllib.request.Request(url, headers={"User-Agent": "flashgpt", "Accept-Encoding": "identity", **headers})
    try:
        return urllib.request.build_opener(redirects).open(request, timeout=TIMEOUT), redirects.linked
    except urllib.error.HTTPError as error:
        if error.code >= 500 or error.code in (408, 416, 429):
            raise (Beyond if error.code == 416 else Broken)(f"the server answers {error.code} {error.reason}") from None
        raise Fault(f"{url}: the server answers {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise Broken("the server does not answer") from None
        raise Unreachable(getattr(error.reason, "strerror", None) or str(error.reason)) from None
    except (http.client.HTTPException, OSError) as error:
        raise Broken(str(error) or type(error).__name__) from None
    except ValueError as error:
        raise Fault(f"{url}: is no URL that can be opened: {error}") from None


def read_url(url, most=64 << 20):
    """The bytes of a small answer and the headers with it. Raises Unreachable or Fault."""
    for attempt in range(TRIES):
        try:
            response, _ = open_url(url)
            with response:
                return response.read(most), response.headers
        except (Broken, http.client.HTTPException, OSError) as error:
            reason = str(error) or type(error).__name__
        time.sleep(PAUSE * 2**attempt if attempt + 1 < TRIES else 0)
    raise Fault(f"{url}: {reason}, {TRIES} times in a row")


class Part:
    """The bytes of a file that are here, their SHA-256 and a lock on them."""

    def __init__(self, path):
        self.path = path
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.file)
            raise Fault(f"{path}: another process is downloading it now") from None
        self.size, self.sum = 0, hashlib.sha256()
        while piece := os.pread(self.file, CHUNK, self.size):
            self.sum.update(piece)
            self.size += len(piece)

    def append(self, data):
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self.file, data[done:], self.size + done)
        except OSError as error:
            raise Fault(f"{self.path}: cannot write at byte {self.size + done}: {error.strerror}") from None
        self.sum.update(data)
        self.size += len(data)

    def empty(self):
        os.ftruncate(self.file, 0)
        self.size, self.sum = 0, hashlib.sha256()

    def publish(self, path):
        os.fsync(self.file)
        os.rename(self.path, path)

    def close(self):
        os.close(self.file)


class Download:
    """One file on its way, over as many connections as it takes."""

    def __init__(self, remote, path):
        self.url, self.size, self.sha256 = remote
        self.path, self.name = path, os.path.basename(path)
        self.validator = None  # what the server calls this version of the file: rests are asked of no other
        self.progress = None

    def learn(self, response, linked):
        """Size and sum, where the server says them; fails where the size is not the expected one."""
        etag = linked.get("x-linked-etag", "").strip('"')
        if not self.sha256 and re.fullmatch("[0-9a-f]{64}", etag):
            self.sha256 = etag
        length, place = response.headers.get("Content-Length"), response.headers.get("Content-Range", "")
        if response.status == 206:
            length = place.rpartition("/")[2]
        size = int(length) if (length or "").isdigit() else None
        if size is not None and self.size is not None and size != self.size:
            raise Fault(f"{self.url}: the server has {size} bytes of it, expected {self.size}")
        self.size = self.size if size is None else size
        tag = response.headers.get("ETag", "")
        self.validator = tag if tag and not tag.startswith("W/") else response.headers.get("Last-Modified")

    def receive(self, part):
        """Adds to a part what one connection brings."""
        rest, version = {"Range": f"bytes={part.size}-"} if part.size else {}, self.validator
        if rest and version:
            rest["If-Range"] = version
        try:
            response, linked = open_url(self.url, **rest)
        except Beyond:
            part.empty()
            raise
        with response:
            self.learn(response, linked)
            place = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
            belongs = response.status == 206 and place and int(place[1]) == part.size
            if belongs and not (version or self.sha256):
                part.empty()  # left by an earlier run: nothing would tell whether the rest belongs to it
                raise Broken("the server names no SHA-256")
            if part.size and not belongs:
                part.empty()  # the server does not give rests, or the file is another one by now
            self.show(part)
            try:
                while data := response.read1(CHUNK):
                    part.append(data)
                    self.progress.add(len(data))
            except (http.client.HTTPException, OSError) as error:
                raise Broken(f"the connection broke after {part.size} bytes ({error or type(error).__name__})") from None
        if self.size is not None and part.size < self.size:
            raise Broken(f"the connection ended after {part.size} of {self.size} bytes")

    def show(self, part):
        """The bar from here on: the sizes are known now."""
        self.progress = Progress(self.size or 0, label=self.name)
        self.progress.done = self.progress.resumed = part.size

    def check(self, part):
        """Fails, and drops what came, where it is not the file that was asked for."""
        found = part.sum.hexdigest()
        if self.size is not None and part.size > self.size:
            fault = f"{part.size} bytes came, expected {self.size}"
        elif self.sha256 and found != self.sha256:
            fault = f"what came has the SHA-256 {found}, expected {self.sha256}"
        else:
            return
        os.unlink(part.path)
        raise Fault(f"{self.url}: {fault}; it was dropped")

    def run(self):
        """Until the file is there. Raises Fault, or Unreachable where there was never a connection."""
        part = Part(self.path + ".part")
        try:
            failures, before = 0, -1
            while True:
                try:
                    if part.sum.hexdigest() != self.sha256:
                        self.receive(part)
                    break
                except (Broken, Unreachable) as error:
                    if isinstance(error, Unreachable) and before < 0:
                        raise
                    failures = 0 if part.size > before else failures + 1
                    before = part.size
                    if failures == TRIES:
                        raise Fault(f"{self.url}: {error}; nothing more came in {TRIES} tries; what came is kept in "
                                    f"{part.path}: run this again to go on") from None
                    time.sleep(PAUSE * 2**failures if failures else 0)
            self.check(part)
            part.publish(self.path)
        finally:
            if self.progress:
                self.progress.end()
            if not part.size:
                with contextlib.suppress(OSError):
                    os.unlink(part.path)
            part.close()


def download(remote, path):
    """Brings a file to path, unless there is one. Raises Fault, or Unreachable where there is no way to the server."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    if os.path.exists(path):
        return
    Download(remote, path).run()


def main(argv=None):
    parser = argparse.ArgumentParser(description="Downloads files: resumed where a connection broke, and checked.")
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--to", required=True, metavar="DIR", help="where the files go, under the last part of their URLs")
    parser.add_argument("--sha256", help="what the file must have, where there is one URL")
    args = parser.parse_args(argv)
    if args.sha256 and (len(args.urls) > 1 or not re.fullmatch("[0-9a-f]{64}", args.sha256)):
        parser.error("--sha256 takes the 64 hexadecimal digits of one file")
    try:
        for url in args.urls:
            path = os.path.join(args.to, os.path.basename(urllib.parse.urlsplit(url).path))
            try:
                download(Remote(url, None, args.sha256), path)
            except Unreachable as error:
                raise Fault(f"{url}: cannot be reached ({error}); offline, put the file at {path}") from None
            print(f"{path}: {os.path.getsize(path)} bytes")
    except Fault as fault:
        print(f"download.py: {fault}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"download.py: {error.filename or args.to}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("download.py: stopped; run this again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
