"""Dashboard of a run's islands: a page on this machine, and the same figures for Prometheus. Needs no jax."""

import argparse
import json
import signal
import socket
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from noloco_jax.errors import UserError
from noloco_jax.island.prometheus import CONTENT_TYPE, MissingError, exposition
from noloco_jax.island.watcher import Watcher
from noloco_jax.islands.discovery import read_run
from noloco_jax.islands.roster import Address, parse_address

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_STOPS = (signal.SIGINT, signal.SIGTERM)
_PAGE = resources.files("noloco_jax.island") / "page"
_POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:; base-uri 'none'; frame-ancestors 'none'"


def dashboard(flags: argparse.Namespace) -> int:
    """Serve the page until the command is stopped."""
    address = parse_address(flags.listen)
    if not 0.2 <= flags.every <= 3600:
        raise UserError(f"--every={flags.every}: give 0.2 to 3600 seconds")
    watcher = Watcher(read_run(flags.roster), flags.keys, flags.every)
    server = DashboardServer(address, watcher)
    # Blocked in all threads, of which another might take a signal and leave the waiting one asleep.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    watcher.start()
    server.start()
    print(f"dashboard: http://{server.address}/, metrics for Prometheus: http://{server.address}/metrics", flush=True)
    signal.sigwait(_STOPS)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    server.close()
    watcher.close()
    return 0


class DashboardServer:
    """HTTP server of the page, the watcher's JSON and the metrics, in threads, from `start` until `close`.

    Args:
      address: where to listen; port 0 takes any that is free.
      watcher: what is served.

    Attributes:
      address: where it listens.

    Raises `UserError` where it cannot listen.
    """

    def __init__(self, address: Address, watcher: Watcher):
        handler = type("Handler", (_Handler,), {"watcher": watcher})
        try:
            self._server = _Server(address, handler)
        except OSError as error:
            raise UserError(f"cannot listen at {address} ({error.strerror}): give another --listen=HOST:PORT") from None
        self.address = Address(address.host, self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True, name="dashboard")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """Server of IPv4 or IPv6, as its address is."""

    def __init__(self, address: Address, handler: type[BaseHTTPRequestHandler]):
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, where = found[0]
        super().__init__((str(where[0]), address.port), handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a handler's error, except for a browser that has left."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    watcher: Watcher

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/data.json":
            self._send(json.dumps(self.watcher.to_json()).encode(), "application/json")
        elif path == "/metrics":
            try:
                self._send(exposition(self.watcher.to_json()), CONTENT_TYPE)
            except MissingError as error:
                self._send(f"{error}\n".encode(), "text/plain; charset=utf-8", HTTPStatus.NOT_IMPLEMENTED)
        else:
            name = path.removeprefix("/") or "index.html"
            file = _PAGE / name
            kind = _TYPES.get(name.rpartition(".")[2])
            if "/" in name or kind is None or not file.is_file():
                self._send(b"not found\n", "text/plain; charset=utf-8", HTTPStatus.NOT_FOUND)
            else:
                self._send(file.read_bytes(), f"{kind}; charset=utf-8")

    def log_message(self, format: str, *args: object) -> None:
        pass  # a page that polls would fill the terminal

    def _send(self, content: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)
