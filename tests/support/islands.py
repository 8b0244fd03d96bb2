"""Islands on loopback, for tests: keys, rosters and servers."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import trustme

from noloco_jax.islands.client import Client
from noloco_jax.islands.frames import Frame
from noloco_jax.islands.keys import Credentials
from noloco_jax.islands.roster import Address, Island, Roster
from noloco_jax.islands.server import Handlers, Server
from support.ports import free_ports

NAMES = ("paris", "berlin", "rome")


def keys_of(ca: trustme.CA, name: str, **validity: Any) -> Credentials:
    """An island's keys, signed by `ca`."""
    issued = ca.issue_cert(name, **validity)
    return Credentials(ca.cert_pem.bytes(), issued.cert_chain_pems[0].bytes(), issued.private_key_pem.bytes())


def roster_at(ports: Iterable[int], run: str = "test") -> Roster:
    """The islands of `NAMES` on loopback; those for which there is no port are at free ones."""
    all_ports = (*ports, *free_ports(len(NAMES)))[: len(NAMES)]
    return Roster(
        run, tuple(Island(name, Address("127.0.0.1", port)) for name, port in zip(NAMES, all_ports, strict=True))
    )


class Recorder:
    """Handlers that answer simply, and keep what happened.

    Attributes:
      lines: what was reported.
      got: what a test's handlers have received.
      exchange: may be replaced by a test's own.
      state: the same.
    """

    def __init__(self):
        self.lines: list[str] = []
        self.got: list[Frame] = []
        self.exchange: Callable[..., None] = lambda caller, hello, connect: None
        self.state: Callable[..., Iterable[tuple[str, np.ndarray]]] = lambda caller, request: []

    @property
    def handlers(self) -> Handlers:
        return Handlers(
            exchange=lambda *arguments: self.exchange(*arguments),
            state=lambda *arguments: self.state(*arguments),
            actions={"status": lambda caller, argument: {"caller": caller, **argument}},
            report=self.lines.append,
        )


@contextlib.contextmanager
def running(recorder: Recorder, credentials: Credentials | None = None, name: str = "paris") -> Iterator[Server]:
    """A server of island `name` at any free port."""
    server = Server(roster_at([]), name, credentials, recorder.handlers, listen=Address("127.0.0.1", 0))
    try:
        yield server
    finally:
        server.close()


def calling(port: int, credentials: Credentials | None = None, name: str = "berlin") -> Client:
    """A client of island `name` that calls paris at a port."""
    return Client(roster_at([port]), name, credentials, "paris")


def arrays(seed: int = 0) -> list[np.ndarray]:
    """Arrays of several types and sizes, one of them larger than a piece."""
    generator = np.random.default_rng(seed)
    return [
        generator.standard_normal((1100, 2000)).astype(np.float32),
        generator.integers(0, 100, (3, 5)),
        np.asarray(2.5),
        np.zeros((0, 4), np.float16),
    ]


def nothing(_: Mapping[str, Any]) -> None:
    """No header may have arrays."""
