"""Islands that train in real processes, with keys."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from noloco_jax.island.command import main as island
from support import processes, warm
from support.paths import ROOT
from support.ports import free_port
from support.rosters import on_loopback, written

INTERVAL = 0.05  # seconds between two looks at the islands' metrics


class Archipelago:
    """Islands of one configuration. As a context it ends all of its processes.

    Args:
      folder: of everything: roster, keys, and for each island a workdir and its output, `NAME.log`.
      names: of the islands.
      arguments: of `island train`, but for roster, name, keys and workdir.
      environment: of the processes.
      seconds_per_step: that every island sleeps before a step.
      waits: True if every island waits for its exchanges, see `disturbed.py`.
      sizes: island -> the number of its processes, where that is not one; the second of paris is `running["paris.1"]`.
      own: island -> further arguments of its own.
      variables: island -> further variables of its environment.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        seconds_per_step: float = 0.0,
        waits: bool = False,
        sizes: Mapping[str, int] | None = None,
        own: Mapping[str, Sequence[str]] | None = None,
        variables: Mapping[str, Mapping[str, str]] | None = None,
    ):
        self.folder, self.names = folder, tuple(names)
        self._how = "waiting" if waits else f"paced:{seconds_per_step}"
        self._arguments, self._environment = tuple(arguments), environment
        self._sizes, self._own, self._variables = sizes or {}, own or {}, variables or {}
        self.running: dict[str, subprocess.Popen[str]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.roster, self.keys = written(on_loopback(*names), folder / "roster.toml"), folder / "keys"
        assert island(["keys", f"--roster={self.roster}", f"--out={self.keys}"]) == 0

    def __enter__(self) -> "Archipelago":
        return self

    def __exit__(self, *_) -> None:
        processes.kill(list(self.running.values()))

    def start(self, name: str) -> None:
        """Start an island's processes, also where it ran before: by the same command."""
        flags = {"roster": self.roster, "name": name, "keys": self.keys / name, "workdir": self.workdir(name)}
        command = [sys.executable, "-m", "support.disturbed", self._how, "noloco_jax.island", "train", "--linger=0"]
        command += [*(f"--{flag}={value}" for flag, value in flags.items()), *self._arguments, *self._own.get(name, ())]
        place = {}
        if (size := self._sizes.get(name, 1)) > 1:
            place = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": str(size)}
        for number in range(size):
            process = f"{name}.{number}" if number else name
            with self._log(process).open("a") as output:
                self.running[process] = warm.Popen(
                    command,
                    env={**self._environment, **self._variables.get(name, {}), **place, "JAX_PROCESS_ID": str(number)},
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    text=True,
                )

    def train(self) -> None:
        """Start all islands, and wait until each has come to the end of its run."""
        for name in self.names:
            self.start(name)
        ended = {name: process.wait(processes.PATIENCE) for name, process in self.running.items()}
        assert set(ended.values()) == {0}, "\n".join(self.said(name)[-3000:] for name in ended)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send an island's process a signal; one that has ended hears nothing."""
        if self.running[name].poll() is None:
            self.running[name].send_signal(number)

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        self.running[name].wait()

    def workdir(self, name: str) -> Path:
        return self.folder / name

    def lines(self, name: str, kind: str) -> list[dict]:
        """Return an island's metrics of a kind."""
        return [line for line in processes.metrics(self.workdir(name)) if line["kind"] == kind]

    def step(self, name: str) -> int:
        """Return the last step in an island's metrics."""
        return max((line["step"] for line in self.lines(name, "train")), default=0)

    def has_met(self, name: str, after: int = -1) -> bool:
        """Return whether an island has exchanged in a round after `after`."""
        lines = self.lines(name, "exchange")
        return any(line["outcome"] in ("met", "late") and line["round"] > after for line in lines)

    def last_round(self, name: str) -> int:
        """Return the last round in an island's metrics, or -1."""
        return max((line["round"] for line in self.lines(name, "train") if "round" in line), default=-1)

    def until(self, condition: Callable[[], bool], *watched: str) -> None:
        """Wait for a condition while these processes, by default all, run; print what all said where it is not met."""
        is_met = False
        try:
            running = [self.running[name] for name in watched or self.running]
            is_met = processes.wait_until(condition, running, interval=INTERVAL)
        finally:
            if not is_met:
                print(*(self.said(name)[-3000:] for name in self.running), sep="\n")
        assert is_met, "a process ended first"

    def said(self, name: str) -> str:
        """Return all that an island has printed, in one line."""
        return re.sub(r"\s+", " ", self._log(name).read_text())

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"
