"""Islands that train in real processes, with keys."""

import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from support import processes
from support.rosters import on_loopback, with_keys

INTERVAL = 0.05  # seconds between two looks at the islands' metrics


class Site(NamedTuple):
    """Place of an island: its processes, the devices of each, and arguments of its own."""

    number: int = 1
    devices: int = 1
    arguments: Sequence[str] = ()


class Archipelago:
    """Islands of one configuration. As a context it ends all of its processes.

    Args:
      folder: of everything: roster, keys, and for each island a workdir and its output, `NAME.log`.
      sites: island -> its place; the second process of paris is `running["paris.1"]`.
      config: file of the configuration.
      arguments: of `island train`, but for config, roster, name, keys and workdir.
      how: how all are disturbed, see `disturbed.py`.
    """

    def __init__(self, folder: Path, sites: Mapping[str, Site], config: Path, arguments: Sequence[str], how: str):
        self.folder, self.sites, self._config, self._arguments, self._how = folder, sites, config, arguments, how
        self.running: dict[str, subprocess.Popen[str]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.roster, self.keys = with_keys(on_loopback(*sites), folder)

    def __enter__(self) -> "Archipelago":
        return self

    def __exit__(self, *_) -> None:
        processes.kill(list(self.running.values()))

    def start(self, name: str) -> None:
        """Start an island's processes, also where it ran before: by the same command."""
        number, devices, own = self.sites[name]
        names = [f"{name}.{process}" if process else name for process in range(number)]
        flags = [f"--roster={self.roster}", f"--name={name}", f"--keys={self.keys / name}", "--linger=0"]
        started = processes.start(
            *(self._config, self.workdir(name), *flags, *self._arguments, *own),
            number=number,
            devices=devices,
            module=("support.disturbed", self._how, "noloco_jax.island", "train"),
            outputs=[self._log(process) for process in names],
        )
        self.running |= dict(zip(names, started, strict=True))

    def train(self) -> None:
        """Start all islands, and wait until each has come to the end of its run."""
        for name in self.sites:
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

    def has_met(self, name: str, after: int = 0) -> bool:
        """Return whether an island has exchanged in a round after `after`."""
        lines = self.lines(name, "exchange")
        return any(line["outcome"] in ("met", "late") and line["round"] > after for line in lines)

    def last_round(self, name: str) -> int:
        """Return the last round in an island's metrics, counted from 1; 0 before it."""
        return max((line["round"] for line in self.lines(name, "train") if "round" in line), default=0)

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
