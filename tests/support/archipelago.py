"""Islands that train in real processes, with keys, and a network of proxies between every two of them."""

import re
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path

from noloco_jax.island.command import main as island
from support import processes
from support.fault_proxy import FaultProxy
from support.paths import ROOT
from support.ports import free_ports


class Archipelago:
    """Islands of one configuration. As a context it ends all of its processes.

    Args:
      folder: of everything: keys, rosters, and for each island a workdir and its output, `NAME.log`.
      names: of the islands.
      arguments: of `island train`, but for roster, name, keys and workdir.
      environment: of the processes.
      seconds_per_step: that every island sleeps before a step, or each of them.
      altered: island -> how its process is altered, see `altered.py`.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        seconds_per_step: float | Mapping[str, float] = 0.0,
        altered: Mapping[str, str] | None = None,
    ):
        self.folder, self.names = folder, tuple(names)
        self._arguments, self._seconds = tuple(arguments), seconds_per_step
        self._environment, self._altered = environment, altered or {}
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))
        self._proxies = {(one, other): FaultProxy(self._ports[other]) for one, other in permutations(names, 2)}
        self.running: dict[str, subprocess.Popen[str]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            self._roster(name).write_text("\n".join(self._lines(name)))
        roster = self._roster(self.names[0])
        assert island(["keys", f"--roster={roster}", f"--out={folder / 'keys'}"]) == 0

    def __enter__(self) -> "Archipelago":
        return self

    def __exit__(self, *_) -> None:
        processes.kill(list(self.running.values()))
        for proxy in self._proxies.values():
            proxy.__exit__()

    def start(self, name: str) -> None:
        """Starts an island's process, also where it ran before: by the same command."""
        flags = {"roster": self._roster(name), "name": name, "keys": self.folder / "keys" / name}
        flags["workdir"] = self.workdir(name)
        seconds = self._seconds[name] if isinstance(self._seconds, Mapping) else self._seconds
        how = ["support.altered", self._altered[name]] if name in self._altered else ["support.paced"]
        command = [sys.executable, "-m", *how, str(seconds), "noloco_jax.island", "train"]
        with self.log(name).open("a") as output:
            self.running[name] = subprocess.Popen(
                [*command, "--linger=0", *(f"--{flag}={value}" for flag, value in flags.items()), *self._arguments],
                env=self._environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends an island's process a signal; one that has ended hears nothing."""
        if self.running[name].poll() is None:
            self.running[name].send_signal(number)

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        self.running[name].wait()

    def cut_off(self, some: Collection[str]) -> None:
        """Lets nothing pass between these and the others, in either direction, and tells nobody."""
        for proxy in self._between(some):
            proxy.silent |= {"up", "down"}

    def join_again(self, some: Collection[str]) -> None:
        """Ends `cut_off`; connections that have lost bytes are broken."""
        for proxy in self._between(some):
            proxy.silent.clear()
            proxy.reset()

    def _between(self, some: Collection[str]) -> Iterator[FaultProxy]:
        return (proxy for (one, other), proxy in self._proxies.items() if (one in some) != (other in some))

    def workdir(self, name: str) -> Path:
        return self.folder / name

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def lines(self, name: str, kind: str) -> list[dict]:
        """An island's metrics of a kind."""
        return [line for line in processes.metrics(self.workdir(name)) if line["kind"] == kind]

    def step(self, name: str) -> int:
        """The last one of which an island has written."""
        return max((line["step"] for line in self.lines(name, "train")), default=0)

    def steps_taken(self, name: str) -> int:
        """The number of steps of which an island has written, without reading them one by one."""
        path = self.workdir(name) / "metrics.jsonl"
        return path.read_bytes().count(b'"kind": "train"') if path.exists() else 0

    def said(self, name: str) -> str:
        """All that an island has printed, in one line."""
        return re.sub(r"\s+", " ", self.log(name).read_text())

    def _roster(self, name: str) -> Path:
        return self.folder / f"{name}.toml"

    def _lines(self, me: str) -> Iterator[str]:
        yield 'run = "test"'
        for name in self.names:
            port = self._ports[name] if name == me else self._proxies[me, name].port
            yield from ("[[island]]", f'name = "{name}"', f'address = "127.0.0.1:{port}"')
