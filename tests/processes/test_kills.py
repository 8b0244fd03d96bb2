"""Runs whose processes are killed repeatedly at random times and end bitwise as undisturbed ones."""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support import events, processes
from support.kills import PHASES, Kill, SmallRun, newest_checkpoint, start_and_kill, start_and_terminate

NUM_STEPS = 60
ARGUMENTS = [
    f"--config.num_steps={NUM_STEPS}",
    "--config.model.num_layers=1",
    "--config.checkpoint_every=3",
    "--config.keep_checkpoints=1",
    "--config.eval_every=5",
    "--config.eval_batches=1",
    "--start_timeout=45",
]
Interrupt = Callable[[SmallRun, Path, random.Random], Kill | None]
MOST_STARTS = 60  # of one run, which has to progress
MOST_SECONDS = 150  # that processes may outlive a killed one: JAX detects its loss after 100


@pytest.fixture
def count(request) -> int:
    return request.config.getoption("--kills")


@pytest.fixture
def rng(request) -> random.Random:
    return random.Random(request.config.getoption("--kills_seed"))


@pytest.fixture(scope="module", params=[1, 4])
def whole(config, request) -> SmallRun:
    """Return the undisturbed run, in one process and in four."""
    number = request.param
    workdir = config.parent / f"whole{number}"
    started = time.monotonic()
    running = processes.start(config, workdir, *ARGUMENTS, number=number)
    processes.wait_until(processes.reached(workdir, 1), running)
    seconds_to_step = time.monotonic() - started
    results = processes.finish(running)
    assert [status for status, _ in results] == [0] * number, processes.report(results)
    return SmallRun(config, workdir, NUM_STEPS, ARGUMENTS, number, seconds_to_step)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_run_killed_at_random_times_matches_the_undisturbed_run_bitwise(whole, count, rng, capsys):
    """Surviving processes exit with status 1 (transient), or 0 if they had completed."""
    with capsys.disabled():
        interrupt_runs(whole, "killed", start_and_kill, lambda kill: set(kill.statuses) <= {0, 1}, count, rng)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_run_terminated_at_random_times_matches_the_undisturbed_run_bitwise(whole, count, rng, capsys):
    """A run saves and exits with 75; before its handler is set and after it is removed, SIGTERM acts as usual."""

    def is_right(kill: Kill) -> bool:
        if set(kill.statuses) == {75}:
            return kill.lost_steps == 0
        return kill.phase in ("start", "end") and set(kill.statuses) <= {-15, 0, 1}

    with capsys.disabled():
        interrupt_runs(whole, "terminated", start_and_terminate, is_right, count, rng)


def interrupt_runs(
    whole: SmallRun, name: str, interrupt: Interrupt, is_right: Callable[[Kill], bool], count: int, rng: random.Random
) -> None:
    """Interrupt runs until each completes, `count` times in all; check that they end as `whole` did."""
    kills: list[Kill] = []
    for number in itertools.count():
        run = replace(whole, workdir=whole.workdir.parent / f"{name}{whole.number}" / f"run{number}")
        run_kills, wrong = interrupt_until_complete(run, interrupt, rng)
        kills += run_kills
        wrong += [f"{kill.log}: {kill}" for kill in run_kills if not is_right(kill) or kill.seconds > MOST_SECONDS]
        wrong += [] if wrong else differences(run, whole)
        print(f"\n{number + 1} runs, {len(kills)} kills", table(kills), *wrong, sep="\n", flush=True)
        assert not wrong
        if len(kills) >= count:
            return


def interrupt_until_complete(run: SmallRun, interrupt: Interrupt, rng: random.Random) -> tuple[list[Kill], list[str]]:
    """Interrupt a run until it completes; return the kills and a list of failures."""
    kills, newest = [], 0
    for start in range(MOST_STARTS):
        kill = interrupt(run, run.workdir.with_name(f"{run.workdir.name}_log") / str(start), rng)
        if kill is None:
            return kills, []
        kills.append(kill)
        description = f"{kill.lost_steps} steps again, {kill.statuses} after {kill.seconds:.1f} s"
        print(f"{kill.phase} {kill.background}: {description}", flush=True)
        before, newest = newest, newest_checkpoint(run.workdir)
        if newest < before:
            return kills, [f"{kill.log}: the checkpoint of step {before} is lost"]
    return kills, [f"{run.workdir} is not complete after {MOST_STARTS} starts"]


def differences(run: SmallRun, whole: SmallRun) -> list[str]:
    """List files and arrays of a run that are not bitwise those of `whole`, and files that `whole` does not have."""
    found = []
    if processes.metrics(run.workdir) != processes.metrics(whole.workdir):
        found.append(f"{run.workdir}/metrics.jsonl differs")
    if untimed(run.workdir) != untimed(whole.workdir):
        found.append(f"{run.workdir}/tensorboard differs")
    mine, theirs = processes.weights(run.workdir), processes.weights(whole.workdir)
    found += [f"{run.workdir}: {name} differs" for name in theirs if not np.array_equal(mine[name], theirs[name])]
    names = {path.name for path in run.workdir.iterdir()} - {path.name for path in whole.workdir.iterdir()}
    found += [f"{run.workdir / name} is left over" for name in names if not name.endswith(".old")]
    return found


def untimed(workdir: Path) -> list[tuple[int, str, float]]:
    return [value for value in events.shown(workdir) if not value[1].endswith(processes.TIMINGS)]


def table(kills: Sequence[Kill]) -> str:
    """Return a Markdown table with a row for each phase."""
    lines = [
        "| phase | kills | meanwhile a save, a prune | steps again: median, most | others end after: median, most |",
        "|---|---:|---:|---:|---:|",
    ]
    for phase in PHASES:
        phase_kills = [kill for kill in kills if kill.phase == phase]
        background = [kill.background for kill in phase_kills]
        steps = [kill.lost_steps for kill in phase_kills]
        seconds = [kill.seconds for kill in phase_kills if kill.statuses]
        lines.append(
            f"| {phase} | {len(phase_kills)} | {background.count('save')}, {background.count('prune')} "
            f"| {f'{statistics.median(steps):g}, {max(steps)}' if steps else ''} "
            f"| {f'{statistics.median(seconds):.1f}, {max(seconds):.1f} s' if seconds else ''} |"
        )
    return "\n".join(lines)
