"""Hosts on slow links: network namespaces of this machine, joined by a bridge.

Every host is a process that holds a network namespace, a host name and an /etc/hosts of its own, and so is the switch
with the bridge. Nothing has a name outside of them: when their processes end, the kernel removes all links. They end
with the process that made them, however that ends.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noloco_jax.errors import UserError

_PR_SET_PDEATHSIG = 1  # of prctl
_NEEDED = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_BURST = 65_536  # bytes that a link may send at once
_TICKS = 200  # bursts a second, at least, by which the kernel's token bucket reaches a fast link's rate
_QUEUE_SECONDS = 0.2  # how long a packet waits at most before it is dropped
_WAIT_SECONDS = 30.0
_libc = ctypes.CDLL(None)


def check_host() -> None:
    """Raise `UserError` where namespaces or limited links cannot be made."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        raise UserError("a slow network is made of network namespaces, which need Linux and root: run it as root")
    for program, package in _NEEDED.items():
        if shutil.which(program) is None:
            raise UserError(f"a slow network needs the command {program}: install {package}")
    limit = "tc qdisc add dev end0 root tbf rate 1mbit burst 64kb latency 100ms"
    probe = f"ip link add end0 type veth peer name end1 && {limit}"
    tried = subprocess.run(["unshare", "--net", "sh", "-c", probe], capture_output=True, text=True, check=False)
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
        """Start a command on a host; it ends with this process. `options` are those of `subprocess.Popen`."""
        inside = ["nsenter", f"--target={self._held[host + 1].pid}", "--net", "--uts", "--mount", f"--wd={os.getcwd()}"]
        return subprocess.Popen([*inside, "--", *command], preexec_fn=_end_with_parent, **options)

    def _hold(self, stack: contextlib.ExitStack, setup: str) -> None:
        command = ["unshare", "--net", "--uts", "--mount", "sh", "-ec", f"{setup}\necho ready\nexec sleep infinity"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=_end_with_parent)
        stack.callback(_end, process)
        self._held.append(process)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
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
        arguments = [str(self._latency / 2), *(str(host.pid) for host in self._held[1:])]
        command = [
            "nsenter",
            f"--target={self._held[0].pid}",
            "--net",
            sys.executable,
            "-m",
            "noloco_jax.network.delay",
        ]
        process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, text=True, preexec_fn=_end_with_parent
        )
        stack.callback(_end, process)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise UserError("links with a latency need /dev/net/tun, or netem in the kernel: leave --latency at 0")


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(_WAIT_SECONDS)
    if process.stdout is not None:
        process.stdout.close()
