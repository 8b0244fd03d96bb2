"""Ports of this machine for servers that tests start a little later."""

import contextlib
import os
import random
import socket

# Below the ports that Linux gives away by itself, and a part for each of pytest's workers: a free port stays free.
_FIRST, _LAST, _WORKERS = 20_000, 32_000, 16


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens at just now."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    own = (_LAST - _FIRST) // _WORKERS
    first = _FIRST + own * worker
    found: list[int] = []
    for port in random.Random().sample(range(first, first + own), own):  # unlike those of a minute ago
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == number:
            return found
    raise AssertionError(f"of the ports {first} to {first + own} fewer than {number} are free")


def free_port() -> int:
    return free_ports(1)[0]
