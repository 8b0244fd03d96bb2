"""Servers of data on loopback, which fail on demand: S3 (moto), a web server, the hub's API, Google's emulator."""

import contextlib
import hashlib
import json
import logging
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from werkzeug.serving import make_server

from support.ports import free_port

Respond = Callable[[str, list[tuple[str, str]]], Any]
App = Callable[[dict[str, Any], Respond], Iterable[bytes]]


class Request(NamedTuple):
    """Request to a server, `range` as (start, stop) where it was for a part of a file."""

    path: str
    query: str
    range: tuple[int, int] | None
    headers: Mapping[str, str]


class Server:
    """A WSGI application on a port of its own, with a record of its requests.

    Attributes:
      requests: all that came.
      faults: what happens to the next requests for parts of files: an HTTP status, "cut" (half of the body arrives),
        "stall" (nothing does for three seconds) or None.
    """

    def __init__(self, app: App):
        self._app = app
        self.requests: list[Request] = []
        self.faults: deque[int | str | None] = deque()
        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def ranges(self) -> list[tuple[int, int]]:
        """The parts of files that were asked for, in order."""
        return [request.range for request in self.requests if request.range]

    def _answer(self, environ: dict[str, Any], respond: Respond) -> Iterable[bytes]:
        headers = {key[5:].replace("_", "-").lower(): value for key, value in environ.items() if key[:5] == "HTTP_"}
        asked = headers.get("range", "").removeprefix("bytes=").split("-")
        part = (int(asked[0]), int(asked[1]) + 1) if len(asked) == 2 else None
        self.requests.append(Request(unquote(environ["PATH_INFO"]), environ["QUERY_STRING"], part, headers))
        fault = self.faults.popleft() if self.faults and part else None
        if isinstance(fault, int):
            respond(f"{fault} Fault", [("Content-Length", "0")])
            return [b""]
        if fault == "stall":
            time.sleep(3.0)
        whole = b"".join(self._app(environ, respond))
        return [whole[: len(whole) // 2] if fault == "cut" else whole]


# Some owner, whose signature moto does not look at; nobody else may change what is there.
_OWNER = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


def send(method: str, url: str, content: bytes = b"") -> None:
    headers = {"Content-Type": "application/octet-stream", "Authorization": _OWNER}
    urllib.request.urlopen(urllib.request.Request(url, content, headers, method=method)).close()


def files_below(folder: Path) -> Iterable[tuple[str, bytes]]:
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            yield file.relative_to(folder).as_posix(), file.read_bytes()


class S3(Server):
    """moto's S3."""

    def __init__(self):
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        super().__init__(DomainDispatcherApplication(create_backend_app))

    def upload(self, folder: Path) -> str:
        """Copy a folder into a bucket of its own and return its address there."""
        bucket = f"bucket-{uuid.uuid4().hex}"
        send("PUT", f"{self.address}/{bucket}")
        for name, content in files_below(folder):
            self.put_file(f"s3://{bucket}/in/{name}", content)
        return f"s3://{bucket}/in"

    def put_file(self, path: str, content: bytes) -> None:
        send("PUT", f"{self.address}/{quote(path.removeprefix('s3://'))}", content)

    def delete(self, path: str) -> None:
        send("DELETE", f"{self.address}/{quote(path.removeprefix('s3://'))}")


def serve_file(file: Path, environ: Mapping[str, Any], respond: Respond) -> list[bytes]:
    """Answer a request for a file or for a part of it."""
    state = file.stat()
    tag, size = ("ETag", f'"{state.st_mtime_ns}"'), state.st_size
    asked = environ.get("HTTP_RANGE", "").removeprefix("bytes=").split("-")
    if len(asked) < 2:
        respond("200 OK", [("Content-Length", str(size)), tag])
        return [file.read_bytes() if environ["REQUEST_METHOD"] == "GET" else b""]
    start, stop = int(asked[0]), min(int(asked[1]) + 1, size)
    if start >= stop:
        respond("416 Range Not Satisfiable", [("Content-Length", "0"), ("Content-Range", f"bytes */{size}")])
        return [b""]
    where = ("Content-Range", f"bytes {start}-{stop - 1}/{size}")
    respond("206 Partial Content", [("Content-Length", str(stop - start)), where, tag])
    with file.open("rb") as opened:
        opened.seek(start)
        return [opened.read(stop - start)]


class Web(Server):
    """A web server of one folder, which may send files whole whatever is asked for."""

    def __init__(self):
        self.folder, self.sends_parts = Path(), True
        super().__init__(self._serve)

    def upload(self, folder: Path) -> str:
        self.folder = folder
        return self.address

    def _serve(self, environ: dict[str, Any], respond: Respond) -> Iterable[bytes]:
        file = self.folder / unquote(environ["PATH_INFO"])[1:]
        if not file.is_file():
            respond("404 Not Found", [("Content-Length", "0")])
            return [b""]
        return serve_file(file, environ if self.sends_parts else {"REQUEST_METHOD": environ["REQUEST_METHOD"]}, respond)


class Hub(Server):
    """The parts of the hub's HTTP API that a data set is read by, for the one at `REPOSITORY`.

    Contents come from another server, to which it redirects.
    """

    REPOSITORY = "datasets/owner/name"

    def __init__(self):
        self.contents = Web()
        super().__init__(self._serve)

    def close(self) -> None:
        super().close()
        self.contents.close()

    def upload(self, folder: Path) -> str:
        self.contents.upload(folder)
        return f"hf://{self.REPOSITORY}"

    def _serve(self, environ: dict[str, Any], respond: Respond) -> Iterable[bytes]:
        path = unquote(environ["PATH_INFO"])
        repository = f"/api/{self.REPOSITORY}"
        if path.startswith(resolve := f"/{self.REPOSITORY}/resolve/main/"):
            respond("302 Found", [("Location", f"{self.contents.address}/{quote(path.removeprefix(resolve))}")])
            return [b""]
        if path.startswith(tree := f"{repository}/tree/main"):
            return self._list(path.removeprefix(tree).strip("/"), environ, respond)
        found = path in (repository, f"{repository}/revision/main")
        content = {"id": "owner/name", "sha": "0" * 40, "siblings": []} if found else {"error": "Repository not found"}
        return self._json("200 OK" if found else "404 Not Found", content, respond, "RepoNotFound")

    def _list(self, below: str, environ: dict[str, Any], respond: Respond) -> Iterable[bytes]:
        folder = self.contents.folder / below
        if not folder.is_dir():
            return self._json("404 Not Found", {"error": "no such entry"}, respond, "EntryNotFound")
        recursive = "recursive=true" in environ["QUERY_STRING"].lower()
        entries = []
        for entry in sorted(folder.rglob("*") if recursive else folder.iterdir()):
            name = entry.relative_to(self.contents.folder).as_posix()
            if entry.is_dir():
                entries.append({"type": "directory", "path": name, "oid": "0" * 40})
                continue
            digest = hashlib.sha256(entry.read_bytes()).hexdigest()
            size = entry.stat().st_size
            lfs = {"oid": digest, "size": size, "pointerSize": 130}
            entries.append({"type": "file", "path": name, "size": size, "oid": digest[:40], "lfs": lfs})
        return self._json("200 OK", entries, respond)

    def _json(self, status: str, content: Any, respond: Respond, code: str = "") -> list[bytes]:
        body = json.dumps(content).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        respond(status, [*headers, *([("X-Error-Code", code)] if code and status[0] == "4" else [])])
        return [body]


def wait_for(url: str) -> None:
    """Return once a server answers."""
    for _ in range(300):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url).close()
            return
        time.sleep(0.1)
    raise AssertionError(f"{url} does not answer")


# By itself it answers one connection at a time, and pyarrow leaves some open. Its threads must not write all that it
# holds while others change it.
_EMULATE = """
import http.server, sys
from gcp_storage_emulator import server
server.server.HTTPServer = http.server.ThreadingHTTPServer
server.Storage._write_config_to_file = lambda storage: None
server.create_server("127.0.0.1", int(sys.argv[1]), in_memory=True, default_bucket="bucket").run()
"""


class Google:
    """The emulator gcp-storage-emulator, a process of its own: pyarrow waits for it with Python's lock held."""

    def __init__(self):
        port = free_port()
        command = [sys.executable, "-c", _EMULATE, str(port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.address = f"http://127.0.0.1:{port}"
        wait_for(f"{self.address}/storage/v1/b")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def upload(self, folder: Path) -> str:
        below = uuid.uuid4().hex
        for name, content in files_below(folder):
            query = f"uploadType=media&name={quote(f'{below}/{name}', safe='')}"
            send("POST", f"{self.address}/upload/storage/v1/b/bucket/o?{query}", content)
        return f"gs://bucket/{below}"


STORES: dict[str, Callable[[], Any]] = {"s3": S3, "http": Web, "hf": Hub, "gs": Google}
