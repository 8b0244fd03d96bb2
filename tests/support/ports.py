"""Ports of this machine for servers that tests start a little later."""

import contextlib
import functools
import itertools
import os
import random
import socket
from collections.abc import Iterator

# Below the ports that Linux gives away by itself, and a part for each of pytest's workers: a free port stays free.
_FIRST, _LAST, _WORKERS = 20_000, 32_000, 16
_OWN = (_LAST - _FIRST) // _WORKERS


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens at just now. None is given twice: its server may be down for a moment only."""
    found: list[int] = []
    for port in itertools.islice(_shuffled(), _OWN):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == number:
            return found
    raise AssertionError(f"of a worker's {_OWN} ports fewer than {number} are free")


def free_port() -> int:
    return free_ports(1)[0]


@functools.cache
def _shuffled() -> Iterator[int]:
    """This process's ports, in an order of its own, again and again."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    first = _FIRST + _OWN * worker
    return itertools.cycle(random.Random().sample(range(first, first + _OWN), _OWN))
