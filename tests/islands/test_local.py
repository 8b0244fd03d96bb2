"""`island local`: all islands of a run on this machine."""

import argparse
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from noloco_jax.errors import INTERRUPTED, RESTART
from noloco_jax.islands import local
from support.live_island import LiveIsland, training, wait_for
from support.rosters import on_loopback, with_keys

# In place of an island: writes its arguments, and does what `--act` says at each of its starts.
PROGRAM = """
import os, pathlib, signal, sys, time
command, *arguments = sys.argv[1:]
values = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
if command == "merge":
    pathlib.Path(values["--out"]).write_text(" ".join(arguments[3:]))
    sys.exit()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
starts = pathlib.Path(values["--workdir"], "starts")
starts.write_text((starts.read_text() if starts.exists() else "") + "x")


def all_have_started():
    while sum(file.stat().st_size > 0 for file in starts.parent.parent.glob("*/starts")) < 3:
        time.sleep(0.01)
    return True


exec(values["--act"])
"""


def trained(monkeypatch, workdir: Path, act: str) -> int:
    monkeypatch.setattr(local, "_ISLAND", (sys.executable, "-c", PROGRAM))
    return local.local(argparse.Namespace(number=3, workdir=workdir), [f"--act={act}"])


def starts(workdir: Path) -> list[int]:
    return [len((workdir / f"island{i}/starts").read_text()) for i in range(3)]


def test_a_killed_island_starts_again_one_with_a_mistake_does_not_and_the_others_are_merged(monkeypatch, tmp_path):
    killed = "values['--name'] == 'island0' and len(starts.read_text()) == 1 and os.kill(os.getpid(), 9)"
    act = f"{killed}; sys.exit(2 if values['--name'] == 'island1' else 0)"
    assert trained(monkeypatch, tmp_path, act) == 2
    assert starts(tmp_path) == [2, 1, 1]
    assert (tmp_path / "merged").read_text() == f"{tmp_path}/island0 {tmp_path}/island2"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, RESTART), (signal.SIGINT, INTERRUPTED)])
def test_a_signal_lets_all_islands_save_and_merges_nothing(monkeypatch, tmp_path, number, status):
    signals = f"values['--name'] == 'island0' and all_have_started() and os.kill(os.getppid(), {int(number)})"
    assert trained(monkeypatch, tmp_path, f"{signals}; time.sleep(60)") == status
    assert starts(tmp_path) == [1, 1, 1]
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("status", [2, 0], ids=["given up", "complete"])
def test_the_others_hear_that_an_island_has_ended_for_good_until_they_end(monkeypatch, tmp_path, status):
    told: list[tuple[Path, str, int]] = []
    monkeypatch.setattr(local, "_tell_ended", lambda folder, one: told.append((folder, one.name, one.status)))
    monkeypatch.setattr(local, "_TELL_EVERY_SECONDS", 0.5)
    act = f"sys.exit({status}) if values['--name'] == 'island1' else time.sleep(3)"
    assert trained(monkeypatch, tmp_path, act) == status
    assert told.count((tmp_path, "island1", status)) > 1


@pytest.mark.parametrize("status", [2, 0], ids=["given up", "complete"])
def test_an_island_that_has_ended_for_good_is_waited_for_no_more_by_one_that_trains(tmp_path, status):
    roster, keys = with_keys(on_loopback("island0", "island1"), tmp_path)
    island = LiveIsland("island0", roster, tmp_path, keys / "island0")
    with training(island):
        wait_for(lambda: island.link.is_listening)
        assert island.link.node.unfinished() == ["island1"]
        ended: Any = SimpleNamespace(name="island1", status=status)
        local._tell_ended(tmp_path, ended)
        assert island.link.node.finished() == ([] if status else ["island1"])
        assert island.link.node.unfinished() == []
        if status:  # nor does it wait for island1 to begin; after a finished one there is nothing to begin
            wait_for(lambda: island.step > 0, 60)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("", [{}] * 3),  # none on purpose
        ("4, 7,9", [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in "479"]),
        ("4,7", [{"CUDA_VISIBLE_DEVICES": gpu, "XLA_CLIENT_MEM_FRACTION": "0.45"} for gpu in "474"]),
    ],
)
def test_islands_share_the_visible_gpus_and_their_memory(monkeypatch, visible, expected):
    for name in ("JAX_PLATFORMS", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [local._gpu_of(number, 3) for number in range(3)] == expected
