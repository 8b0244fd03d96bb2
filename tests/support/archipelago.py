"""Islands that train in real processes, with keys, and a network of proxies between every two of them."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path

from noloco_jax.island.command import main as island
from noloco_jax.islands.roster import Address, Member, Roster
from support import processes, warm
from support.fault_proxy import FaultProxy
from support.paths import ROOT
from support.ports import free_port, free_ports
from support.rosters import written

INTERVAL = 0.05  # seconds between two looks at the islands' metrics, whose lines come by the tenth of a second


class Archipelago:
    """Islands of one configuration. As a context it ends all of its processes.

    Args:
      folder: of everything: keys, rosters, and for each island a workdir and its output, `NAME.log`.
      names: of the islands.
      arguments: of `island train`, but for roster, name, keys and workdir.
      environment: of the processes.
      seconds_per_step: that every island sleeps before a step.
      waits: True if every island waits for its exchanges, and at its first start for the others, see `waiting.py`.
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
        self._arguments, self._seconds = tuple(arguments), seconds_per_step
        self._environment, self._waits, self._sizes = environment, waits, dict(sizes or {})
        self._own, self._variables = dict(own or {}), dict(variables or {})
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))
        self._proxies = {(one, other): FaultProxy(self._ports[other]) for one, other in permutations(names, 2)}
        self.running: dict[str, subprocess.Popen[str]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            written(self._seen_from(name), self._roster(name))
        self.make_keys()

    def __enter__(self) -> "Archipelago":
        return self

    def __exit__(self, *_) -> None:
        processes.kill(list(self.running.values()))
        for proxy in self._proxies.values():
            proxy.__exit__()

    def make_keys(self, *more: str) -> None:
        """Makes the keys that are missing; `more` are further arguments of `island keys`."""
        assert island(["keys", f"--roster={self._roster(self.names[0])}", f"--out={self.keys}", *more]) == 0

    @property
    def keys(self) -> Path:
        """The folder of the islands' keys."""
        return self.folder / "keys"

    def start(self, name: str, *more: str) -> None:
        """Starts an island's processes, also where it ran before: by the same command, and `more` arguments."""
        flags = {"roster": self._roster(name), "name": name, "keys": self.keys / name}
        how = ["waiting"] if self._waits else ["paced", str(self._seconds), "noloco_jax.island", "train"]
        arguments = [*(f"--{flag}={value}" for flag, value in flags.items()), *self._arguments]
        self._start(name, how, [*arguments, *self._own.get(name, ()), *more])

    def _start(self, name: str, how: Sequence[str], arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", f"support.{how[0]}", *how[1:]]
        command += ["--linger=0", f"--workdir={self.workdir(name)}", *arguments]  # which may say how long to linger
        place = {}
        if (size := self._sizes.get(name, 1)) > 1:
            place = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": str(size)}
        for number in range(size):
            process = f"{name}.{number}" if number else name
            with self.log(process).open("a") as output:
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

    def has_met(self, name: str, other: str | None = None, after: int = -1) -> bool:
        """Return whether an island has exchanged, with one other island or any, in a round after `after`."""
        lines = (line for line in self.lines(name, "exchange") if other in (None, line["partner"]))
        return any(line["outcome"] in ("met", "late") and line["round"] > after for line in lines)

    def last_round(self, name: str) -> int:
        """The last round of which an island has written, or -1."""
        return max((line["round"] for line in self.lines(name, "train") if "round" in line), default=-1)

    def until(self, condition: Callable[[], bool], *watched: str) -> None:
        """Wait for a condition while these processes, by default all, run; print what all said where it is not met."""
        is_met = False
        try:
            is_met = processes.wait_until(
                condition, [self.running[name] for name in watched or self.running], 240, INTERVAL
            )
        finally:
            if not is_met:
                print(*(self.said(name)[-3000:] for name in self.running), sep="\n")
        assert is_met, "a process ended first"

    def said(self, name: str) -> str:
        """All that an island has printed, in one line."""
        return re.sub(r"\s+", " ", self.log(name).read_text())

    def _roster(self, name: str) -> Path:
        return self.folder / f"{name}.toml"

    def _seen_from(self, me: str) -> Roster:
        ports = {name: self._ports[name] if name == me else self._proxies[me, name].port for name in self.names}
        rows = [Member(i, name, Address("127.0.0.1", port)) for i, (name, port) in enumerate(ports.items())]
        return Roster("test", tuple(rows), len(rows))
