"""Runs of the trainer whose processes are killed at random instants."""

import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from support import processes
from support.paths import ROOT
from support.ports import free_port

_SAVING, _PRUNING = "os.mkdir,os.rename", "os.remove,os.rmdir"
_MOST_OPERATIONS = 120  # of either, which a few saves and deletions take
_MOST_STEPS = 12
_STACKS_SECONDS = 0.5  # within which a process that is asked writes them

# Of the functions in the main thread of a killed process, the first that is listed here names its phase.
_PHASES = {
    "save": ("save", "close"),
    "evaluation": ("_evaluate",),
    "outer step": ("_outer_step",),
    "step": ("train_steps",),
    "restore": ("restored_state", "_open_metrics"),
    "compile": ("_compile",),
    "end": ("sample_of_run", "plot_curves", "shutdown", "_shutdown"),
}
PHASES = ("start", "compile", "restore", "step", "outer step", "evaluation", "save", "end")
# And those of other threads that write a checkpoint or delete an older one meanwhile.
_BACKGROUND = {
    "prune": ("delete_steps",),
    "save": ("_background_wait_for_commit_futures", "_target_setting_result", "_finalize"),
}


@dataclass(frozen=True)
class SmallRun:
    """A run to be killed.

    Attributes:
      config: its file.
      workdir: its folder.
      num_steps: of its length.
      arguments: of its command.
      number: of its processes.
      seconds_to_step: that it takes to its first step, at the most.
    """

    config: Path
    workdir: Path
    num_steps: int
    arguments: Sequence[str]
    number: int
    seconds_to_step: float


@dataclass(frozen=True)
class Kill:
    """Outcome of one kill.

    Attributes:
      phase: where the process stood that was killed, or the first of several.
      background: what its other threads did: "save", "prune" or neither.
      lost_steps: those that were taken and have to be taken again.
      statuses: what the processes ended with that were left.
      seconds: for how long the last of these outlived the kill.
      log: the folder of what the processes printed.
    """

    phase: str
    background: str
    lost_steps: int
    statuses: tuple[int, ...]
    seconds: float
    log: Path


def start_and_kill(run: SmallRun, log: Path, rng: random.Random) -> Kill | None:
    """Starts a run and kills one of its processes or all of them; None where it came to its end before.

    Args:
      run: to be started.
      log: a folder to be made, for what the processes print.
      rng: draws the instant and the victims.
    """
    log.mkdir(parents=True)
    victims = list(range(run.number)) if rng.random() < 0.25 else [rng.randrange(run.number)]
    operation = ""
    if rng.random() < 0.3:
        victims = [0, *victims[1:]]  # the first process makes, renames and deletes folders
        operation = f"{rng.choice((_SAVING, _PRUNING))}:{rng.randrange(1, _MOST_OPERATIONS)}"
    started = _start(run, log, victims[0], operation)
    try:
        if operation:
            _wait(started, lambda: False)
        else:
            _wait_for_instant(run, started, rng)
        if all(process.poll() == 0 for process in started):
            return None
        stacks = _stacks(log, victims[0], started[victims[0]])
        killed = time.monotonic()
        for victim in victims:
            started[victim].send_signal(signal.SIGKILL)
        others = [process for number, process in enumerate(started) if number not in victims]
        for process in others:
            process.wait(processes.PATIENCE)
        seconds = time.monotonic() - killed
    finally:
        processes.kill(started)
    if [started[victim].returncode for victim in victims] == [0] * len(victims):
        return None
    statuses = tuple(process.returncode for process in others)
    return Kill(*_phase(stacks), _lost_steps(run.workdir), statuses, seconds, log)


def start_and_terminate(run: SmallRun, log: Path, rng: random.Random) -> Kill | None:
    """Starts a run and sends one of its processes a SIGTERM; None where the run came to its end before.

    Arguments are those of `start_and_kill`; `Kill.statuses` are those of all processes.
    """
    log.mkdir(parents=True)
    victim = rng.randrange(run.number)
    started = _start(run, log, victim, "")
    try:
        _wait_for_instant(run, started, rng)
        if all(process.poll() == 0 for process in started):
            return None
        stacks = _stacks(log, victim, started[victim])
        signalled = time.monotonic()
        started[victim].send_signal(signal.SIGTERM)
        statuses = tuple(process.wait(processes.PATIENCE) for process in started)
        seconds = time.monotonic() - signalled
    finally:
        processes.kill(started)
    if set(statuses) == {0}:
        return None
    return Kill(*_phase(stacks), _lost_steps(run.workdir), statuses, seconds, log)


def newest_checkpoint(workdir: Path) -> int:
    """The step of the newest whole checkpoint; 0 if there is none."""
    folders = (workdir / "checkpoints").glob("*")
    return max((int(path.name) for path in folders if path.name.isdigit()), default=0)


def _start(run: SmallRun, log: Path, victim: int, operation: str) -> list[subprocess.Popen[str]]:
    place = {}
    if run.number > 1:
        place = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": str(run.number)}
    # Programs are read and none is written: JAX does not write them whole or not at all.
    place["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "1e9"
    started = []
    for number in range(run.number):
        watched = [str(ROOT / "tests/support/watched.py"), str(log / f"stacks.{number}")]
        with (log / f"output.{number}").open("w") as output:
            started.append(
                subprocess.Popen(
                    [
                        *(sys.executable, *watched, operation if operation and number == victim else ":0"),
                        *(f"--config={run.config}", f"--workdir={run.workdir}", *run.arguments),
                    ],
                    env=processes.environment(run.config) | place | {"JAX_PROCESS_ID": str(number)},
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
    return started


def _wait_for_instant(run: SmallRun, started: Sequence[subprocess.Popen[str]], rng: random.Random) -> None:
    """Waits for an instant before the steps, among the next of them, or at the end."""
    if rng.random() < 0.35:
        _wait(started, lambda: False, rng.uniform(0, run.seconds_to_step))
        return
    step = newest_checkpoint(run.workdir) + 1 + rng.randrange(_MOST_STEPS)
    lines = len(processes.metrics(run.workdir))
    _wait(started, lambda: len(processes.metrics(run.workdir)) != lines)  # those that are taken again are gone
    _wait(started, processes.reached(run.workdir, min(step, run.num_steps)))
    _wait(started, lambda: False, rng.uniform(0, 0.1 if step < run.num_steps else 2))


def _wait(
    started: Sequence[subprocess.Popen[str]], condition: Callable[[], bool], seconds: float = processes.PATIENCE
) -> None:
    """Waits for a condition, at most so many seconds, or until a process has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition():
        if any(process.poll() is not None for process in started):
            return
        time.sleep(0.002)


def _stacks(log: Path, number: int, process: subprocess.Popen[str]) -> str:
    """Return the stack of every thread of a process; empty before the trainer is imported."""
    path = log / f"stacks.{number}"
    if not path.exists():
        return ""
    if process.poll() is None:
        process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_SECONDS
        while time.monotonic() < deadline and not path.read_text().endswith("in <module>\n"):  # the main thread's end
            time.sleep(0.001)
    return path.read_text()


def _phase(stacks: str) -> tuple[str, str]:
    """Return where the main thread stands, and what the others do to checkpoints."""
    threads = stacks.split("\n\n")
    main = "".join(thread for thread in threads if "watched.py" in thread and "<module>" in thread) or stacks
    return _first(_PHASES, main) or "start", _first(_BACKGROUND, stacks)


def _first(named: Mapping[str, Sequence[str]], stacks: str) -> str:
    found = set(re.findall(r"line \d+ in (\w+)", stacks))
    return next((name for name, functions in named.items() if found.intersection(functions)), "")


def _lost_steps(workdir: Path) -> int:
    taken = max((line["step"] for line in processes.metrics(workdir)), default=0)
    return max(taken - newest_checkpoint(workdir), 0)
