"""The two sides of `chaos.py`: islands under a tape of faults, and one program of the same replicas under the same."""

import contextlib
import heapq
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support import processes
from support.archipelago import Archipelago
from support.fault_tape import Strike
from support.kills import newest_checkpoint
from support.paths import ROOT
from support.ports import free_port

_LOOK_SECONDS, _COUNT_SECONDS = 0.1, 1.0
Later = Callable[[], None]


@dataclass
class Result:
    """Result of a side.

    Attributes:
      seconds: from the first step of all to the last.
      steps: inner steps of all replicas that its weights have seen; those that were lost and repeated count once.
      strikes: what happened, by kind.
      finished: whether all steps were taken in time.
      present: share of all replicas' seconds in which none was kept away: killed and not started again, or stopped.
      crashes: ends of processes that no fault explains.
      workdirs: where the weights are.
      met, due: exchanges that came about, of those that were due; of islands.
      one_sided: exchanges that only one of the two may have entered.
      heals: states taken from others.
    """

    seconds: float
    steps: int
    strikes: Counter[str]
    finished: bool
    workdirs: list[Path]
    present: float = 1.0
    crashes: int = 0
    met: int = 0
    due: int = 0
    one_sided: int = 0
    heals: int = 0


@dataclass
class _Clock:
    """Strikes as they fall due, and what ends them."""

    tape: Iterator[Strike]
    strike: Callable[[Strike], Later | None]
    strikes: Counter[str] = field(default_factory=Counter)
    _ends: list[tuple[float, int, Later]] = field(default_factory=list)
    _next: Strike | None = None

    def tick(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            heapq.heappop(self._ends)[2]()
        self._next = self._next or next(self.tape, None)
        while self._next is not None and self._next.at <= now:
            end = self.strike(self._next)
            if end is not None:
                self.strikes[self._next.kind] += 1
                heapq.heappush(self._ends, (now + self._next.seconds, self.strikes.total(), end))
            self._next = next(self.tape, None)


def run_islands(islands: Archipelago, tape: Iterator[Strike], total: int, limit: float) -> Result:
    """Lets islands train until all together have taken `total` steps, or for `limit` seconds.

    The islands that are there then save, and `Result.workdirs` are theirs.
    """
    away: dict[str, float] = {}  # killed and not started again yet, or stopped: since when
    seconds_away = 0.0
    crashes = 0

    def back(name: str) -> None:
        nonlocal seconds_away
        seconds_away += time.monotonic() - away.pop(name)

    def begin_again(name: str) -> None:
        back(name)
        islands.start(name)

    def wake(name: str) -> None:
        back(name)
        islands.signal(name, signal.SIGCONT)

    def strike(fault: Strike) -> Later | None:
        victim = fault.victims[0]
        if fault.kind == "partition":
            islands.cut_off(fault.victims)
            return lambda: islands.join_again(fault.victims)
        if victim in away:
            return None
        away[victim] = time.monotonic()
        if fault.kind == "stop":
            islands.signal(victim, signal.SIGSTOP)
            return lambda: wake(victim)
        islands.kill(victim)
        return lambda: begin_again(victim)

    for name in islands.names:
        islands.start(name)
    watched = list(islands.running.values())
    processes.wait_until(lambda: all(islands.step(name) for name in islands.names), watched, processes.PATIENCE)
    clock, started, steps, count_at = _Clock(tape, strike), time.monotonic(), 0, 0.0
    while steps < total and (now := time.monotonic() - started) < limit:
        clock.tick(now)
        for name, process in islands.running.items():
            if name not in away and process.poll() is not None:
                crashes += 1
                islands.start(name)
        if now >= count_at:
            steps, count_at = sum(islands.steps_taken(name) for name in islands.names), now + _COUNT_SECONDS
        time.sleep(_LOOK_SECONDS)
    seconds = time.monotonic() - started
    seconds_away += sum(time.monotonic() - since for since in away.values())
    steps = sum(islands.steps_taken(name) for name in islands.names)
    there = [name for name in islands.names if name not in away]
    for name in there:
        islands.signal(name, signal.SIGTERM)
    for name in there:
        islands.running[name].wait(processes.PATIENCE)
    result = Result(
        seconds=seconds,
        steps=steps,
        strikes=clock.strikes,
        finished=steps >= total,
        workdirs=[islands.workdir(name) for name in there],
        present=1 - seconds_away / (seconds * len(islands.names)),
        crashes=crashes,
    )
    for name in islands.names:
        exchanges = [line for line in islands.lines(name, "exchange") if line["partner"]]
        result.due += len(exchanges)
        result.met += sum(line["outcome"] != "alone" for line in exchanges)
        result.one_sided += sum(line["one_sided"] for line in exchanges)
        result.heals += islands.said(name).count("training continues from another island's weights")
    return result


def run_together(
    folder: Path,
    names: Sequence[str],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    seconds_per_step: float,
    tape: Iterator[Strike],
    num_steps: int,
    limit: float,
) -> Result:
    """Lets one program of as many processes train until its last step, or for `limit` seconds.

    A killed process ends all of them, which are started again from their checkpoint. One that is stopped, or behind a
    partition, is waited for: a program across a partition stands still for as long as that lasts.
    """
    folder.mkdir(parents=True)
    workdir, crashes = folder / "workdir", 0
    command = ["bash", str(ROOT / "launch/local.sh"), str(len(names)), sys.executable, "-m"]
    command += ["support.paced", str(seconds_per_step), "noloco_jax.train"]
    running: list[subprocess.Popen[str]] = []

    def start() -> None:
        with (folder / "output.log").open("a") as output:
            running[:] = [
                subprocess.Popen(
                    [*command, f"--workdir={workdir}", *arguments],
                    env={**environment, "PORT": str(free_port())},
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            ]

    is_away = False

    def begin_again() -> None:
        nonlocal is_away
        is_away = False
        start()

    def strike(fault: Strike) -> Later | None:
        nonlocal is_away
        workers = _workers(running[0].pid)
        number = names.index(fault.victims[0])
        if is_away or number >= len(workers):  # they are down already
            return None
        if fault.kind == "kill":
            os.kill(workers[number], signal.SIGKILL)
            running[0].wait()
            is_away = True
            return begin_again
        os.kill(workers[number], signal.SIGSTOP)
        return lambda: _go_on(workers[number])

    start()
    try:
        processes.wait_until(processes.reached(workdir, 1), running, processes.PATIENCE)
        clock, started, finished = _Clock(tape, strike), time.monotonic(), False
        while not finished and (now := time.monotonic() - started) < limit:
            clock.tick(now)
            if not is_away and running[0].poll() is not None:
                finished = running[0].returncode == 0
                crashes += not finished
                if not finished:
                    start()
            time.sleep(_LOOK_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running[0].pid, signal.SIGKILL)
        running[0].wait()
    taken = num_steps if finished else newest_checkpoint(workdir)
    return Result(now, taken * len(names), clock.strikes, taken == num_steps, [workdir], crashes)


def _workers(launcher: int) -> list[int]:
    """The training processes that a launcher has started, in their order."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    pids = [int(pid) for pid in children.read_text().split()] if children.exists() else []
    return [pid for pid in pids if b"noloco_jax.train" in _command_line(pid)]


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
