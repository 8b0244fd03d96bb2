"""Real processes over TLS: a third island joins two that train, one is removed, one moves, and none is disturbed."""

import re
import shutil
import signal

import pytest

from noloco_jax.island.command import main as island
from noloco_jax.island.merge import mean_of, of_live_islands
from noloco_jax.islands.discovery import read_run
from support import processes
from support.archipelago import Archipelago
from support.ports import free_ports

pytestmark = pytest.mark.timeout(600)

FOUNDERS = ("paris", "rome")


@pytest.fixture
def group(config, tmp_path):
    fields = {"num_replicas": 2, "num_steps": 4000, "eval_every": 4000, "checkpoint_every": 4000}
    arguments = [f"--config={config}", *(f"--config.{field}={value}" for field, value in fields.items())]
    with Archipelago(tmp_path, FOUNDERS, arguments, processes.environment(config), 0.1) as islands:
        yield islands


def end(islands: Archipelago, name: str) -> None:
    islands.signal(name, signal.SIGTERM)
    assert islands.running[name].wait(120) == 75


def test_islands_join_are_removed_and_move_while_the_others_train(group, capsys):
    folder, keys = group.folder, f"--keys={group.keys}"
    for name in FOUNDERS:
        group.start(name)
    group.until(lambda: group.has_met("paris", "rome"))

    assert island(["invite", "--name=oslo", f"--address=127.0.0.1:{free_ports(1)[0]}", keys]) == 0
    assert "told to paris, rome" in capsys.readouterr().out
    (folder / "carried").mkdir()
    shutil.copytree(folder / "keys" / "oslo", folder / "carried" / "oslo")
    group.join("oslo", folder / "carried/oslo/members.json", "paris")
    group.until(lambda: all(group.has_met("oslo", name) and group.has_met(name, "oslo") for name in FOUNDERS))
    assert "training continues from another island's weights" in group.said("oslo")
    assert (folder / "oslo/members.json").exists() and (folder / "rome/members.json").exists()

    assert island(["remove", "rome", keys, f"--from-round={group.last_round('paris') + 12}"]) == 0
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "told to oslo, paris, rome" in out
    gone = int(re.findall(r"no member from round (\d+) on", out)[0]) - 1
    assert island(["status", f"--roster={folder / 'paris.toml'}", keys]) == 0
    table = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "oslo" in table and "rome is removed" in table and "all that answer" in table
    group.until(lambda: group.has_met("paris", "oslo", gone + 2) and group.has_met("oslo", "paris", gone + 2))
    assert not any(group.has_met(name, "rome", gone - 1) for name in ("paris", "oslo"))
    rome = group.running.pop("rome")
    for name in group.running:
        assert group.running[name].poll() is None
        assert name == "oslo" or "another island's weights" not in group.said(name)

    source = of_live_islands(read_run(folder / "paris.toml"), folder / "keys", ask_seconds=10, seconds=60)
    merged = mean_of(source, print)
    assert (merged.rounds.keys(), merged.away) == ({"paris", "oslo"}, {})

    assert rome.wait(120) == 0  # it ends by itself, and refuses to start again
    assert "rome was removed from the run: everything is saved at step" in group.said("rome")
    group.start("rome")
    assert group.running.pop("rome").wait(120) == 2
    assert "rome was removed from the run, before round" in group.said("rome")

    end(group, "paris")  # it comes back at another address, and tells oslo
    moved, before = free_ports(1)[0], group.last_round("oslo")
    group.start("paris", f"--address=127.0.0.1:{moved}")
    group.until(lambda: group.has_met("oslo", "paris", before) and group.has_met("paris", "oslo", before))
    assert f"paris is at 127.0.0.1:{moved} from now on" in group.said("oslo")
    for name in group.running:
        end(group, name)
