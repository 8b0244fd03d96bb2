"""Real processes over TLS: a third island joins two that train, one is removed, one moves, and none is disturbed."""

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from noloco_jax.island.command import main as island
from noloco_jax.island.merge import mean_of, of_live_islands
from noloco_jax.islands.discovery import read_run
from support import processes, warm
from support.archipelago import INTERVAL
from support.paths import ROOT
from support.ports import free_ports

pytestmark = pytest.mark.timeout(600)

FOUNDERS = ("paris", "rome")


class Group:
    """Processes of islands, each with a workdir and a log beside the roster and the keys."""

    def __init__(self, config: Path, folder: Path):
        self.config, self.folder = config, folder
        self.ports: dict[str, int] = dict(zip((*FOUNDERS, "oslo"), free_ports(3), strict=True))
        self.running: dict[str, subprocess.Popen[str]] = {}
        islands = [f'[[island]]\nname = "{name}"\naddress = "127.0.0.1:{self.ports[name]}"' for name in FOUNDERS]
        (folder / "roster.toml").write_text('run = "test"\n' + "\n".join(islands))
        assert island(["keys", f"--roster={folder / 'roster.toml'}", f"--out={folder / 'keys'}"]) == 0

    def start(self, name: str, command: str, *flags: str) -> None:
        paced = [sys.executable, "-m", "support.paced", "0.1", "noloco_jax.island", command]
        with (self.folder / f"{name}.log").open("a") as output:
            self.running[name] = warm.Popen(
                [*paced, *flags, "--linger=0", f"--workdir={self.folder / name}"],
                env=processes.environment(self.config),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def stop(self, name: str) -> None:
        self.running[name].send_signal(signal.SIGTERM)
        assert self.running[name].wait(120) == 75

    def train(self, name: str, **more: str) -> None:
        """Start a founder."""
        fields = {"num_replicas": 2, "num_steps": 4000, "eval_every": 4000, "checkpoint_every": 4000}
        flags = {"roster": self.folder / "roster.toml", "name": name, "keys": self.folder / "keys" / name}
        flags |= {"config": self.config, **more, **{f"config.{field}": value for field, value in fields.items()}}
        self.start(name, "train", *(f"--{flag}={value}" for flag, value in flags.items()))

    def met(self, name: str, other: str, after: int = -1) -> bool:
        lines = [line for line in processes.metrics(self.folder / name) if line["kind"] == "exchange"]
        return any(x["partner"] == other and x["outcome"] in ("met", "late") and x["round"] > after for x in lines)

    def round(self, name: str) -> int:
        lines = [line for line in processes.metrics(self.folder / name) if line["kind"] == "exchange"]
        return max((line["round"] for line in lines), default=-1)

    def log(self, name: str) -> str:
        return re.sub(r"\s+", " ", (self.folder / f"{name}.log").read_text())

    def wait(self, condition) -> None:
        logs = "\n".join(f"{name}: {self.log(name)[-1500:]}" for name in self.running)
        assert processes.wait_until(condition, list(self.running.values()), 240, INTERVAL), logs


@pytest.fixture
def group(config, tmp_path):
    made = Group(config, tmp_path)
    yield made
    processes.kill(list(made.running.values()))


def test_islands_join_are_removed_and_move_while_the_others_train(group, capsys):
    folder, keys = group.folder, f"--keys={group.folder / 'keys'}"
    for name in FOUNDERS:
        group.train(name)
    group.wait(lambda: group.met("paris", "rome"))

    assert island(["invite", "--name=oslo", f"--address=127.0.0.1:{group.ports['oslo']}", keys]) == 0
    assert "told to paris, rome" in capsys.readouterr().out
    (folder / "carried").mkdir()
    shutil.copytree(folder / "keys" / "oslo", folder / "carried" / "oslo")
    group.start("oslo", "join", f"--entry={folder / 'carried/oslo/members.json'}", "--via=paris")
    group.wait(lambda: all(group.met("oslo", name) and group.met(name, "oslo") for name in FOUNDERS))
    assert "training continues from another island's weights" in group.log("oslo")
    assert (folder / "oslo/members.json").exists() and (folder / "rome/members.json").exists()

    assert island(["remove", "rome", keys, f"--from-round={group.round('paris') + 12}"]) == 0
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "told to oslo, paris, rome" in out
    gone = int(re.findall(r"no member from round (\d+) on", out)[0]) - 1
    assert island(["status", f"--roster={folder / 'roster.toml'}", keys]) == 0
    table = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "oslo" in table and "rome is removed" in table and "all that answer" in table
    group.wait(lambda: group.met("paris", "oslo", gone + 2) and group.met("oslo", "paris", gone + 2))
    assert not any(group.met(name, "rome", gone - 1) for name in ("paris", "oslo"))
    rome = group.running.pop("rome")
    for name in group.running:
        assert group.running[name].poll() is None
        assert name == "oslo" or "another island's weights" not in group.log(name)

    source = of_live_islands(read_run(folder / "roster.toml"), folder / "keys", ask_seconds=10, seconds=60)
    merged = mean_of(source, print)
    assert (merged.rounds.keys(), merged.away) == ({"paris", "oslo"}, {})

    assert rome.wait(120) == 0  # it ends by itself, and refuses to start again
    assert "rome was removed from the run: everything is saved, and there is nothing more to do" in group.log("rome")
    group.train("rome")
    assert group.running.pop("rome").wait(120) == 2
    assert "rome was removed from the run, before round" in group.log("rome")

    group.stop("paris")  # it comes back at another address, and tells oslo
    moved, before = free_ports(1)[0], group.round("oslo")
    group.train("paris", address=f"127.0.0.1:{moved}")
    group.wait(lambda: group.met("oslo", "paris", before) and group.met("paris", "oslo", before))
    assert f"paris is at 127.0.0.1:{moved} from now on" in group.log("oslo")
    for name in group.running:
        group.stop(name)
