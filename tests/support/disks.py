"""A disk of a few megabytes, which fills up and can be made larger: a tmpfs in a mount namespace of its own."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """The disk; `folder` is where any process of this user sees it."""

    def __init__(self, shell: subprocess.Popen[str]):
        self._shell = shell
        self.folder = Path(f"/proc/{shell.pid}/root/mnt")

    def resize(self, kilobytes: int) -> None:
        """Gives it another size."""
        assert self._tell(f"mount -o remount,size={kilobytes}k /mnt")

    def fill(self) -> None:
        """Takes what room is left."""
        with (self.folder / "ballast").open("wb", buffering=0) as ballast:
            ballast.write(bytes(self.room()))
        assert self.room() == 0

    def empty(self) -> None:
        """Gives back what `fill` took."""
        (self.folder / "ballast").unlink()

    def room(self) -> int:
        """Bytes that are left."""
        disk = os.statvfs(self.folder)
        return disk.f_bavail * disk.f_frsize

    def _tell(self, command: str) -> bool:
        assert self._shell.stdin is not None and self._shell.stdout is not None
        self._shell.stdin.write(f"{command} && echo done || echo failed\n")
        self._shell.stdin.flush()
        return self._shell.stdout.readline() == "done\n"


@contextmanager
def small_disk(kilobytes: int) -> Iterator[SmallDisk]:
    """Makes a disk, or skips the test where this user may not; it is gone afterwards."""
    try:
        shell = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--mount", "sh"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except FileNotFoundError:
        pytest.skip("needs a small disk: unshare (util-linux) is not there")
    with shell:
        disk = SmallDisk(shell)
        try:
            mounted = disk._tell(f"mount -t tmpfs -o size={kilobytes}k none /mnt")
        except OSError:  # the shell has ended
            mounted = False
        if not mounted:
            shell.kill()
            pytest.skip("needs a small disk: unprivileged user namespaces are not permitted here")
        yield disk
