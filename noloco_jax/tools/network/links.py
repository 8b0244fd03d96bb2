"""Hosts on slow links: network namespaces of this machine, joined by a bridge.

Every host is a process that holds a network namespace, a host name and an /etc/hosts of its own, and so is the switch
with the bridge. Nothing has a name outside of them: when their processes end, the kernel removes all links. They end
with the process that made them, however that ends.

    nsenter --target=SWITCH --net python -m noloco_jax.tools.network.links SECONDS HOST_PID ...

forwards packets and holds each for a while: the latency of links where the kernel has no netem. It makes a pair of tap
devices for every host, `eth0` in the host's namespace and `portI` in its own. A frame that is sent through one of them
leaves the other after so many seconds. It prints `ready` once all devices are there, and runs until it is killed.
"""

import collections
import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noloco_jax.errors import UserError

_NEEDED = {"ip": "iproute2", "tc": "iproute2", **dict.fromkeys(("unshare", "nsenter", "setpriv"), "util-linux")}
_END_WITH_PARENT = ("setpriv", "--pdeathsig=KILL", "--")
_BURST = 65_536  # bytes that a link may send at once
_TICKS = 200  # bursts a second, at least, by which the kernel's token bucket reaches a fast link's rate
_QUEUE_SECONDS = 0.2  # how long a packet waits at most before it is dropped
_WAIT_SECONDS = 30.0
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # of linux/if_tun.h
_FRAME_BYTES = 65_536  # bytes
_libc = ctypes.CDLL(None, use_errno=True)


def check_host() -> None:
    """Raise `UserError` where namespaces or limited links cannot be made."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise UserError("a slow network is made of network namespaces, which need Linux and root: run it as root")
    for program, package in _NEEDED.items():
        if shutil.which(program) is None:
            raise UserError(f"a slow network needs the command {program}: install {package}")
    limit = "tc qdisc add dev end0 root tbf rate 1mbit burst 64kb latency 100ms"
    links = f"ip link add bridge type bridge && ip link add end0 type veth peer name end1 && {limit}"
    names = "hostname probe && mount --bind /etc/hosts /etc/hosts"
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-ec", f"{links} && {names}"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode:
        raise UserError(f"the kernel refuses namespaces or limited links ({' '.join(tried.stderr.split())[:200]})")


class Hosts:
    """Hosts 10.0.0.1, 10.0.0.2, ..., named host0, host1, ..., each with a link to one switch. A context manager.

    Args:
      rates: bits a second of each host's link, in each direction; infinite: as fast as the machine.
      latency: seconds that a packet travels from one host to another.
      folder: where the hosts' /etc/hosts is written.
    """

    def __init__(self, rates: Sequence[float], latency: float, folder: Path):
        self._rates, self._latency, self._hosts_file = rates, latency, folder / "hosts"
        self._held: list[subprocess.Popen[str]] = []  # the switch, and the hosts
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Hosts":
        names = "".join(f"{self.address(i)} host{i}\n" for i in range(len(self._rates)))
        self._hosts_file.write_text("127.0.0.1 localhost\n" + names)
        with contextlib.ExitStack() as stack:
            self._hold(stack, "ip link set lo up && ip link add bridge type bridge && ip link set bridge up")
            for i in range(len(self._rates)):
                own_hosts = f"mount --bind '{self._hosts_file}' /etc/hosts"
                self._hold(stack, f"ip link set lo up && hostname host{i} && {own_hosts}")
            self._link(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def address(self, host: int) -> str:
        """Return the IP address of a host."""
        return f"10.0.0.{host + 1}"

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host, in a session of its own; it ends with this process.

        Args:
          host: its number.
          command: program and arguments.
          **options: those of `subprocess.Popen`.
        """
        inside = ["nsenter", f"--target={self._held[host + 1].pid}", "--net", "--uts", "--mount", f"--wd={os.getcwd()}"]
        return subprocess.Popen([*_END_WITH_PARENT, *inside, "--", *command], start_new_session=True, **options)

    def _hold(self, stack: contextlib.ExitStack, setup: str) -> None:
        command = ["unshare", "--net", "--uts", "--mount", "sh", "-ec", f"{setup}\necho ready\nexec sleep infinity"]
        self._held.append(process := _start(stack, command))
        if not _is_ready(process):
            raise RuntimeError(f"a network namespace could not be made by: {setup}")

    def _link(self, stack: contextlib.ExitStack) -> None:
        by_netem = self._latency > 0 and self._has_netem()
        if self._latency > 0 and not by_netem:
            self._delay_by_forwarder(stack)
        else:
            for i, host in enumerate(self._held[1:]):
                self._run(0, f"ip link add port{i} type veth peer name eth0 netns {host.pid}")
        for i, rate in enumerate(self._rates):
            self._run(0, f"ip link set port{i} master bridge up")
            self._run(i + 1, f"ip addr add {self.address(i)}/24 dev eth0 && ip link set eth0 up")
            for namespace, device in ((0, f"port{i}"), (i + 1, "eth0")):
                parent = "root"
                if by_netem:
                    delay = f"delay {self._latency / 2 * 1e6:.0f}us limit 100000"
                    self._run(namespace, f"tc qdisc add dev {device} root handle 1: netem {delay}")
                    parent = "parent 1:1"
                if rate != float("inf"):
                    limits = f"rate {rate:.0f}bit burst {max(_BURST, rate / 8 / _TICKS):.0f} latency {_QUEUE_SECONDS}s"
                    self._run(namespace, f"tc qdisc add dev {device} {parent} tbf {limits}")

    def _run(self, namespace: int, command: str) -> None:
        inside = ["nsenter", f"--target={self._held[namespace].pid}", "--net", "sh", "-ec", command]
        done = subprocess.run(inside, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{command}: {done.stderr.strip()}")

    def _has_netem(self) -> bool:
        with contextlib.suppress(RuntimeError):
            self._run(0, "tc qdisc add dev lo root netem delay 1ms && tc qdisc del dev lo root")
            return True
        return False

    def _delay_by_forwarder(self, stack: contextlib.ExitStack) -> None:
        """Make links of tap devices, whose packets a process holds for half of the latency at each end."""
        program = [sys.executable, "-m", "noloco_jax.tools.network.links", str(self._latency / 2)]
        command = ["nsenter", f"--target={self._held[0].pid}", "--net", *program]
        command += [str(host.pid) for host in self._held[1:]]
        if not _is_ready(_start(stack, command, stderr=subprocess.DEVNULL)):
            raise UserError("links with a latency need /dev/net/tun, or netem in the kernel: leave --latency at 0")


def _start(stack: contextlib.ExitStack, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a process that ends with the stack, or with this process; a terminal's Ctrl-C does not reach it."""
    command = [*_END_WITH_PARENT, *command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, **options)
    stack.callback(_end, process)
    return process


def _is_ready(process: subprocess.Popen[str]) -> bool:
    assert process.stdout is not None
    return process.stdout.readline() == "ready\n"


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(_WAIT_SECONDS)
    if process.stdout is not None:
        process.stdout.close()


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
            frame = os.read(device, _FRAME_BYTES)
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
