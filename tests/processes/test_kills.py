"""Runs whose processes are killed at random instants, time and again, come to the end that they would have come to."""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support import events, processes
from support.kills import PHASES, Kill, SmallRun, newest_checkpoint, start_and_kill

NUM_STEPS = 120
ARGUMENTS = [
    f"--config.num_steps={NUM_STEPS}",
    "--config.checkpoint_every=3",
    "--config.keep_checkpoints=1",
    "--config.eval_every=5",
    "--config.eval_batches=1",
    "--start_timeout=45",
]
MOST_STARTS = 60  # of one run: it has to get on
MOST_SECONDS = 120  # for which processes may outlive another


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", [1, 4])
def test_a_run_killed_at_random_instants_ends_bitwise_as_if_it_had_not_been(config, number, request, capsys):
    rng = random.Random(request.config.getoption("--kills_seed"))
    whole = undisturbed(config, number)
    kills: list[Kill] = []
    runs, wrong = 0, []
    while len(kills) < request.config.getoption("--kills"):
        run = replace(whole, workdir=config.parent / f"killed{number}" / f"run{runs}")
        runs += 1
        wrong += finish_killing(run, rng, kills)
        wrong += differences(run, whole)
        with capsys.disabled():
            print(f"\n{runs} runs, {len(kills)} kills", *wrong, sep="\n", flush=True)
    with capsys.disabled():
        print(table(kills), flush=True)
    assert not wrong, "\n".join(wrong)


def undisturbed(config: Path, number: int) -> SmallRun:
    """The same run twice, as the second finds the first one's programs, and so takes the time that others take."""
    workdir = config.parent / f"whole{number}"
    processes.trained(config, f"first{number}", *ARGUMENTS, number=number)
    started = time.monotonic()
    running = processes.start(config, workdir, *ARGUMENTS, number=number)
    processes.wait_until(processes.reached(workdir, 1), running)
    seconds_to_step = time.monotonic() - started
    results = processes.finish(running)
    assert [status for status, _ in results] == [0] * number, processes.report(results)
    return SmallRun(config, workdir, NUM_STEPS, ARGUMENTS, number, seconds_to_step)


def finish_killing(run: SmallRun, rng: random.Random, kills: list[Kill]) -> list[str]:
    """Kills processes of a run, and adds to `kills`, until it comes to its end; returns what went wrong."""
    wrong, newest = [], 0
    for start in range(MOST_STARTS):
        kill = start_and_kill(run, run.workdir.with_name(f"{run.workdir.name}_log") / str(start), rng)
        if kill is None:
            return wrong
        kills.append(kill)
        if set(kill.statuses) - {1}:
            wrong.append(f"{kill.log}: the others ended with {kill.statuses}")
        if kill.seconds > MOST_SECONDS:
            wrong.append(f"{kill.log}: the others ended after {kill.seconds:.0f} s")
        if newest_checkpoint(run.workdir) < newest:
            wrong.append(f"{kill.log}: the checkpoint of step {newest} is lost")
        newest = newest_checkpoint(run.workdir)
    return [*wrong, f"{run.workdir} does not come to its end"]


def differences(run: SmallRun, whole: SmallRun) -> list[str]:
    """What a run has left that is not bitwise what another has."""
    found = []
    for number in range(run.number):
        name = "metrics.jsonl" if number == 0 else f"metrics.{number}.jsonl"
        if processes.metrics(run.workdir, name) != processes.metrics(whole.workdir, name):
            found.append(f"{run.workdir / name} differs")
    if untimed(run.workdir) != untimed(whole.workdir):
        found.append(f"{run.workdir}/tensorboard differs")
    mine, theirs = processes.weights(run.workdir), processes.weights(whole.workdir)
    found += [f"{run.workdir}: {name} differs" for name in theirs if not np.array_equal(mine[name], theirs[name])]
    names = {path.name for path in run.workdir.iterdir()} - {path.name for path in whole.workdir.iterdir()}
    found += [f"{run.workdir / name} is left" for name in names if not name.endswith(".old")]
    return found


def untimed(workdir: Path) -> list[tuple[int, str, float]]:
    return [value for value in events.shown(workdir) if not value[1].endswith(processes.TIMINGS)]


def table(kills: Sequence[Kill]) -> str:
    """A line for every phase: kills, steps taken again, and how long the other processes went on."""
    lines = ["| phase | kills | steps again: median, most | others end after: median, most |", "|---|---:|---:|---:|"]
    for phase in PHASES:
        those = [kill for kill in kills if kill.phase == phase]
        steps = [kill.lost_steps for kill in those]
        seconds = [kill.seconds for kill in those if kill.statuses]
        lines.append(
            f"| {phase} | {len(those)} | {f'{statistics.median(steps):g}, {max(steps)}' if steps else ''} "
            f"| {f'{statistics.median(seconds):.1f}, {max(seconds):.1f} s' if seconds else ''} |"
        )
    return "\n".join(lines)
