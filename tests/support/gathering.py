"""Six islands to which two join, one of which is removed, one killed, and one of which flips the signs that it sends.

    PYTHONPATH=.:tests python -m support.gathering DIR [--steps=1200] [--seconds=0.1]

Real processes over TLS train `configs/quickstart.py`, at least `--seconds` an inner step, and once more undisturbed.
Prints how often each island's due rounds were exchanged, its starts, and the perplexity of the merged models.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from noloco_jax.errors import UserError
from noloco_jax.island.command import main as island
from noloco_jax.islands.roster import Roster
from noloco_jax.metrics.writer import read_metrics
from support.paths import ROOT
from support.rosters import on_loopback, written

FOUNDERS: tuple[str, ...] = ("bergen", "lisbon", "milan", "oslo", "paris", "rome")
JOINING: tuple[str, ...] = ("tallinn", "vienna")
LIAR, REMOVED, KILLED = "milan", "oslo", "paris"
AWAY_SECONDS = 10.0


class Gathering:
    """Islands of one run, with roster, keys, workdirs and logs in a folder."""

    def __init__(self, folder: Path, steps: int, seconds: float, liar: str | None = None):
        self.folder, self.keys, self._steps, self._seconds, self._liar = folder, folder / "keys", steps, seconds, liar
        self.checkouts: dict[str, Path] = {}  # island -> the folder of its code; this one for all others
        names = (*FOUNDERS, *JOINING)
        listed = on_loopback(*names).islands
        self.ports = {name: address.port for name, address in listed}
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.starts = dict.fromkeys(names, 0)
        folder.mkdir(parents=True)
        written(Roster("gathering", tuple(listed[: len(FOUNDERS)])), folder / "roster.toml")
        self.command("keys", f"--roster={folder / 'roster.toml'}", f"--out={self.keys}")

    def command(self, *arguments: str) -> None:
        assert island(arguments) == 0

    def train(self, name: str) -> None:
        fields = {"num_replicas": 6, "num_steps": self._steps, "eval_every": self._steps, "checkpoint_every": 100}
        flags = {"roster": self.folder / "roster.toml", "name": name, "keys": self.keys / name}
        flags |= {"config": "configs/quickstart.py", **{f"config.{field}": value for field, value in fields.items()}}
        self._start(name, "train", *(f"--{flag}={value}" for flag, value in flags.items()))

    def join(self, name: str, via: str) -> None:
        self.command("invite", f"--name={name}", f"--address=127.0.0.1:{self.ports[name]}", f"--keys={self.keys}")
        self._start(name, "join", f"--entry={self.keys / name / 'members.json'}", f"--via={via}")

    def _start(self, name: str, *arguments: str) -> None:
        how = "support.sign_flipping" if name == self._liar else "support.paced"
        command = [sys.executable, "-m", how, str(self._seconds), "noloco_jax.island", *arguments]
        self.starts[name] += 1
        checkout = self.checkouts.get(name, ROOT)
        with (self.folder / f"{name}.log").open("a") as log:
            self.running[name] = subprocess.Popen(
                [*command, f"--workdir={self.folder / name}", "--linger=60"],
                cwd=checkout,
                env=os.environ | {"PYTHONPATH": f"{checkout}:{checkout / 'tests'}"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def exchanges(self, name: str) -> list[dict]:
        try:
            return [line for line in read_metrics(self.folder / name) if line["kind"] == "exchange"]
        except UserError:  # not there yet
            return []

    def round(self, name: str) -> int:
        return max((line["round"] for line in self.exchanges(name)), default=-1)

    def wait_for_round(self, name: str, round: int) -> None:
        while self.round(name) < round:
            assert self.running[name].poll() is None, f"{name} ended: see {self.folder / name}.log"
            time.sleep(0.5)

    def end(self) -> dict[str, int]:
        """Wait for all; return the exit statuses."""
        return {name: process.wait() for name, process in self.running.items()}

    def perplexity(self, names: Sequence[str]) -> float:
        """Return the perplexity of the merged model of these islands."""
        out = self.folder / f"merged-{len(names)}"
        shutil.rmtree(out, ignore_errors=True)
        command = ["merge", f"--out={out}", "--evaluate", "--workdirs", *(str(self.folder / name) for name in names)]
        done = subprocess.run(
            [sys.executable, "-m", "noloco_jax.island", *command], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return float(re.findall(r"perplexity ([\d.]+)", done.stdout)[-1])


def disturbed(folder: Path, steps: int, seconds: float) -> None:
    group = Gathering(folder, steps, seconds, LIAR)
    for name in FOUNDERS:
        group.train(name)
    group.wait_for_round("bergen", 10)
    for name in JOINING:
        group.join(name, "bergen")
    group.wait_for_round("bergen", 30)
    group.command("remove", REMOVED, f"--keys={group.keys}", f"--from-round={group.round('bergen') + 15}")
    group.wait_for_round("bergen", 60)
    group.running[KILLED].send_signal(signal.SIGKILL)
    group.running[KILLED].wait()
    time.sleep(AWAY_SECONDS)
    group.train(KILLED)
    statuses = group.end()
    print(f"\n{'island':8} {'due':>4} {'exchanged':>9} {'share':>6} starts status")
    for name in (*FOUNDERS, *JOINING):
        lines = [line for line in group.exchanges(name) if line["partner"] and line["outcome"] != "healed"]
        met = sum(line["outcome"] in ("met", "late") for line in lines)
        share = f"{met / max(len(lines), 1):.0%}"
        print(f"{name:8} {len(lines):4} {met:9} {share:>6} {group.starts[name]:6} {statuses[name]:6}")
    finished = [name for name in (*FOUNDERS, *JOINING) if name != REMOVED]
    honest = [name for name in finished if name != LIAR]
    print(f"merged model of {len(honest)}, without {LIAR}: perplexity {group.perplexity(honest):.3f}")
    print(f"merged model of {len(finished)}, with {LIAR}: perplexity {group.perplexity(finished):.3f}", flush=True)


def undisturbed(folder: Path, steps: int, seconds: float) -> None:
    group = Gathering(folder, steps, seconds)
    for name in FOUNDERS:
        group.train(name)
    group.end()
    print(f"undisturbed, merged model of {len(FOUNDERS)}: perplexity {group.perplexity(FOUNDERS):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=lambda text: Path(text).resolve())
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seconds", type=float, default=0.1)
    flags = parser.parse_args()
    disturbed(flags.folder / "disturbed", flags.steps, flags.seconds)
    undisturbed(flags.folder / "undisturbed", flags.steps, flags.seconds)


if __name__ == "__main__":
    main()
