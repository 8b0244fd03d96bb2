"""Forwarder of packets that holds each for a while: the latency of links where the kernel has no netem.

    nsenter --target=SWITCH --net python -m noloco_jax.tools.network.delay SECONDS HOST_PID ...

It makes a pair of tap devices for every host: `eth0` in the host's namespace, `portI` in its own. A frame that is sent
through one of them leaves the other after so many seconds. It prints `ready` once all devices are there, and ends when
it is killed.
"""

import collections
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # of linux/if_tun.h
_FRAME = 65_536  # bytes
_libc = ctypes.CDLL(None, use_errno=True)


def main(arguments: Sequence[str]) -> None:
    """Forward until the process is killed."""
    hold, own = float(arguments[0]), os.open("/proc/self/ns/net", os.O_RDONLY)
    other: dict[int, int] = {}
    for number, pid in enumerate(arguments[1:]):
        port = _tap(f"port{number}")
        _enter(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY))
        host = _tap("eth0")
        _enter(own)
        other |= {port: host, host: port}
    print("ready", flush=True)
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()  # in the order of their times
    poll = select.epoll()
    for device in other:
        poll.register(device, select.EPOLLIN)
    while True:
        timeout = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else -1
        for device, _ in poll.poll(timeout):
            frame = os.read(device, _FRAME)
            waiting.append((time.monotonic() + hold, other[device], frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, device, frame = waiting.popleft()
            try:
                os.write(device, frame)
            except OSError:  # a device that is down, or full, drops what comes
                continue


def _tap(name: str) -> int:
    device = os.open(Path("/dev/net/tun"), os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    main(sys.argv[1:])
