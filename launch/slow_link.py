"""Run two processes of one command as one run over a slow link (Linux, as root).

    python launch/slow_link.py --mbit=1 --delay=0.1 python -m noloco_jax.train --config=... --workdir=...

Each process is in a network namespace of its own, with a TUN device and no other network, and knows its place by
JAX_PROCESS_ID. This program forwards every packet to the other device: at `--mbit` megabit/s, then `--delay` seconds
later, each way independently. A packet that would queue for more than a second is dropped, as routers do. A process
that fails ends the other, and its exit status is this program's. Needs `ip`, `unshare` and /dev/net/tun.
"""

import argparse
import collections
import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
QUEUE_SECONDS = 1.0
# gloo binds to the address of the host's name: an address as name needs no look-up.
ENTER = """set -e
read -r _  # until the device is here
hostname "$1"
ip link set lo up
ip addr add "$1/24" dev "$2"
ip link set "$2" up
shift 2
exec "$@" </dev/null"""


class Direction:
    """One way of the link: packets in order, each sent at the link's rate and delivered `delay` seconds later."""

    def __init__(self, source: int, sink: int, bits_per_second: float, delay: float):
        self.source, self._sink, self._rate, self._delay = source, sink, bits_per_second, delay
        self._sent_at = 0.0  # when the last packet accepted has left the queue
        self._packets: collections.deque[tuple[float, bytes]] = collections.deque()

    def accept(self, now: float) -> None:
        """Read one packet; queue or drop it."""
        try:
            packet = os.read(self.source, 65536)
        except OSError:  # the process at that end is gone, and the device with its namespace
            return
        start = max(now, self._sent_at)
        if start - now < QUEUE_SECONDS:
            self._sent_at = start + 8 * len(packet) / self._rate
            self._packets.append((self._sent_at + self._delay, packet))

    def deliver(self, now: float) -> float:
        """Write the packets that are due; return the seconds until the next one, at most 0.1."""
        while self._packets and self._packets[0][0] <= now:
            with contextlib.suppress(OSError):  # the process at that end is gone
                os.write(self._sink, self._packets.popleft()[1])
        return max(min(self._packets[0][0] - now, 0.1), 0.0) if self._packets else 0.1


def open_tun(name: str) -> int:
    """Create a TUN device, which lives as long as the returned file descriptor."""
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def start(process: int, device: str, command: list[str]) -> subprocess.Popen:
    """Start the command in a network namespace that holds the device."""
    place = {"JAX_COORDINATOR_ADDRESS": "10.77.0.1:29500", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(process)}
    address = f"10.77.0.{process + 1}"
    command = ["unshare", "--net", "--uts", "sh", "-c", ENTER, "sh", address, device, *command]
    child = subprocess.Popen(command, env=os.environ | place, stdin=subprocess.PIPE)
    own = os.readlink("/proc/self/ns/net")
    while child.poll() is None and os.readlink(f"/proc/{child.pid}/ns/net") == own:
        time.sleep(0.01)
    subprocess.run(["ip", "link", "set", device, "netns", str(child.pid)], check=True)
    assert child.stdin is not None
    child.stdin.write(b"\n")
    child.stdin.close()
    return child


def main() -> int:
    """Run the command twice, forwarding packets until both have ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=1.0, help="megabit/s each way (default %(default)s)")
    parser.add_argument("--delay", type=float, default=0.1, help="seconds one way (default %(default)s)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    flags = parser.parse_args()
    if not flags.command:
        parser.error("give the command to run")
    if os.geteuid() != 0:
        parser.error("network namespaces need root: run it with sudo")
    devices = [f"slow{os.getpid()}{end}" for end in "ab"]
    tuns = [open_tun(device) for device in devices]
    ways = [Direction(tuns[i], tuns[1 - i], 1e6 * flags.mbit, flags.delay) for i in (0, 1)]
    children = [start(i, device, flags.command) for i, device in enumerate(devices)]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the children have it from the terminal, and still need the link
    signal.signal(signal.SIGTERM, lambda *_: [child.terminate() for child in children])
    status = 0
    while any([child.poll() is None for child in children]):
        wait = min(way.deliver(time.monotonic()) for way in ways)
        ready, _, _ = select.select(tuns, [], [], wait)
        for way in ways:
            if way.source in ready:
                way.accept(time.monotonic())
        if not status and (status := next((child.returncode for child in children if child.poll()), 0)):
            [child.terminate() for child in children]
    status = status or next((child.returncode for child in children if child.returncode), 0)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
