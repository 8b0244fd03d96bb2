"""Machines of one test: network namespaces, each with one link to the first (Linux, as root)."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator

HUB = "10.77.0.1"


def are_permitted() -> bool:
    """Return whether this process may make namespaces and links."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        return False
    trial = "ip link add trial0 type veth peer name trial1"
    return subprocess.run(["unshare", "--net", "sh", "-c", trial], capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def hub_and_spokes(count: int) -> Iterator[list[list[str]]]:
    """Yield, of a hub at `HUB` and of each spoke, what goes ahead of a command to run it there.

    The hub forwards nothing, so that no spoke reaches another.
    """
    holders = [subprocess.Popen(["unshare", "--net", "sleep", "600"]) for _ in range(count + 1)]
    try:
        own = os.readlink("/proc/self/ns/net")
        for holder in holders:
            while os.readlink(f"/proc/{holder.pid}/ns/net") == own:
                time.sleep(0.01)
        enter = [["nsenter", f"--target={holder.pid}", "--net"] for holder in holders]

        def ip(place: int, *arguments: str) -> None:
            subprocess.run([*enter[place], "ip", *arguments], check=True)

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
        yield enter
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
