"""A disk that fills up during a run: a one-line error, no loss, and the same command resumes once there is room."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import processes
from support.disks import SmallDisk, small_disk

pytestmark = pytest.mark.timeout(900)

LONG = ["--config.num_steps=80", "--config.checkpoint_every=20", "--config.keep_checkpoints=9"]
ROOM = 10_000  # kilobytes, enough for a few checkpoints


@pytest.fixture
def disk() -> Iterator[SmallDisk]:
    with small_disk(ROOM) as disk:
        yield disk


def assert_full_disk_error(status: int, output: str, disk: SmallDisk) -> None:
    """Check that a run ended with a one-line error that names a path on the full disk."""
    assert status == 1, output
    assert "Traceback" not in output, output
    [line] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert output.endswith(f"{line}\n")
    assert str(disk.folder) in line and "no space left on device" in line.lower()


def saved(workdir: Path) -> list[int]:
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


def test_a_run_resumes_once_a_full_disk_has_room_again(config, disk):
    whole = processes.trained(config, "whole", *LONG)
    size = sum(path.stat().st_size for path in (whole / "checkpoints/20").rglob("*") if path.is_file()) // 1024
    workdir = disk.folder / "run"

    disk.resize(5 * size // 2)  # room for two checkpoints but not for a third
    [result] = processes.run(config, workdir, *LONG)
    assert_full_disk_error(*result, disk)
    assert saved(workdir) == [20, 40]

    disk.resize(5 * size)  # room for all checkpoints
    [(status, output)] = processes.run(config, workdir, *LONG)
    assert status == 0, output
    assert "resuming from the checkpoint of step 40" in output
    processes.assert_equal_runs(workdir, whole)
