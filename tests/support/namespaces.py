"""Machines of one test: network namespaces, each with one link to the first (Linux, as root).

python -m support.namespaces PROCESS MODULE ARGUMENT...      runs a module in the namespace of a process
"""

import contextlib
import ctypes
import os
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HUB = "10.77.0.1"


def are_permitted() -> bool:
    """Return whether this process may make namespaces and links."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        return False
    trial = "ip link add trial0 type veth peer name trial1"
    return subprocess.run(["unshare", "--net", "sh", "-c", trial], capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def hub_and_spokes(count: int) -> Iterator[list[int]]:
    """Yield a process of a hub at `HUB`, and of each spoke, to whose namespaces others may go.

    The hub forwards nothing, so that no spoke reaches another.
    """
    holders = [subprocess.Popen(["unshare", "--net", "sleep", "600"]) for _ in range(count + 1)]
    try:
        own = os.readlink("/proc/self/ns/net")
        for holder in holders:
            while os.readlink(f"/proc/{holder.pid}/ns/net") == own:
                time.sleep(0.01)

        def ip(place: int, *arguments: str) -> None:
            subprocess.run(["nsenter", f"--target={holders[place].pid}", "--net", "ip", *arguments], check=True)

        for place in range(count + 1):
            ip(place, "link", "set", "lo", "up")
        ip(0, "addr", "add", f"{HUB}/32", "dev", "lo")
        for place, holder in enumerate(holders[1:], start=1):
            near, far = f"10.77.{place}.1", f"10.77.{place}.2"
            link, own_link = f"spoke{place}", "hub"
            ip(0, "link", "add", link, "type", "veth", "peer", "name", own_link, "netns", str(holder.pid))
            ip(0, "addr", "add", f"{near}/24", "dev", link)
            ip(0, "link", "set", link, "up")
            ip(place, "addr", "add", f"{far}/24", "dev", own_link)
            ip(place, "link", "set", own_link, "up")
            ip(place, "route", "add", "default", "via", near)
        yield [holder.pid for holder in holders]
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def main() -> None:
    _, process, *sys.argv = sys.argv
    with Path(f"/proc/{process}/ns/net").open() as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0  # `os` has it since Python 3.12
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
