"""Dashboard of a run's islands: a page on this machine, and the same figures for Prometheus. Needs no jax."""

import argparse
import json
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from noloco_jax.errors import UserError
from noloco_jax.islands.ask import open_run
from noloco_jax.islands.roster import Address, parse_address
from noloco_jax.islands.standing import AWAY, TRAINING
from noloco_jax.islands.watcher import Watcher

PREFIX = "noloco_island_"
GAUGES = {
    "up": "1 if the island answers, 0 if it is away; absent once it has finished, left or was removed, and is gone",
    "training": "1 while the island trains",
    "round": "Rounds that the island has ended",
    "step": "Inner steps",
    "steps_late": "Mean inner steps from the end of a round until its correction",
    "participation": "Share of messages with a partner that were exchanged, since its start",
    "members": "Members of its last round, as it knows them",
    "loss": "Training loss in nats a token",
    "perplexity": "Validation perplexity of the last evaluation",
    "tokens_per_second": "Throughput of training",
}
STATE = "state"
COUNTERS = {  # since the island's start
    "due": "Messages with a partner",
    "committed": "Messages exchanged",
    "one_sided": "Exchanges that only the partner may have applied",
}
_STOPS = (signal.SIGINT, signal.SIGTERM)
_POLICY = "default-src 'self' 'unsafe-inline'; img-src data:; base-uri 'none'; frame-ancestors 'none'"


def dashboard(flags: argparse.Namespace) -> int:
    """Serve the page until the command is stopped."""
    address = parse_address(flags.listen)
    if not 0.2 <= flags.every <= 3600:
        raise UserError(f"--every={flags.every}: give 0.2 to 3600 seconds")
    reopen = partial(open_run, flags.roster, flags.keys)
    watcher = Watcher(reopen(), flags.every, reopen=reopen)
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

    At port 0 it listens at any that is free: see `address`. Raises `UserError` where it cannot listen.
    """

    def __init__(self, address: Address, watcher: Any):
        handler = type("Handler", (_Handler,), {"watcher": watcher})
        try:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, *_, where = found[0]
            server = type("Server", (_Server,), {"address_family": family})
            self._server = server((str(where[0]), address.port), handler)
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
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a handler's error, except for a browser that has left."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    watcher: Any

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/":
            page = resources.files("noloco_jax.islands") / "page.html"
            self._send(page.read_bytes(), "text/html; charset=utf-8")
        elif path == "/data.json":
            self._send(json.dumps(self.watcher.to_json()).encode(), "application/json")
        elif path == "/history.json":
            self._send(json.dumps(self.watcher.history()).encode(), "application/json")
        elif path == "/metrics":
            self._send(exposition(self.watcher.to_json()), "text/plain; version=0.0.4; charset=utf-8")
        else:
            self._send(b"not found\n", "text/plain; charset=utf-8", HTTPStatus.NOT_FOUND)

    def log_message(self, format: str, *args: object) -> None:
        pass  # a page that polls would fill the terminal

    def _send(self, content: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": _POLICY,
            "X-Content-Type-Options": "nosniff",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def exposition(run: dict[str, Any]) -> bytes:
    """Return the metrics of a run, as `Watcher.to_json` describes it, in Prometheus' format."""
    registry = CollectorRegistry()
    registry.register(_Collector(run))
    return generate_latest(registry)


class _Collector:
    def __init__(self, run: dict[str, Any]):
        self._run = run

    def collect(self) -> Iterator[Any]:
        labels = ["run", "island"]
        families = {name: GaugeMetricFamily(PREFIX + name, text, labels=labels) for name, text in GAUGES.items()}
        families |= {name: CounterMetricFamily(PREFIX + name, text, labels=labels) for name, text in COUNTERS.items()}
        states = GaugeMetricFamily(PREFIX + STATE, "1 for the island's state", labels=[*labels, STATE])
        for island, one in self._run["islands"].items():
            states.add_metric([self._run["run"], island, one["state"]], 1.0)
            for name, value in values_of(one).items():
                families[name].add_metric([self._run["run"], island], value)
        yield from (states, *families.values())


def values_of(island: dict[str, Any]) -> dict[str, float]:
    """Return the values of an island; of one that does not answer its counters alone, and 0 for "up" if it is away."""
    values: dict[str, float] = {name: float(island[name]) for name in COUNTERS if name in island}
    if not island["answers"]:
        return values | ({"up": 0.0} if island["state"] == AWAY else {})
    known = {**island, **island["figures"], "up": 1.0, "training": island["state"] == TRAINING}
    return values | {name: float(known[name]) for name in GAUGES if known.get(name) is not None}
