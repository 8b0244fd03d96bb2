"""Runs whose processes are killed or terminated at random instants end bitwise as undisturbed ones."""

import itertools
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import processes

NUM_STEPS = 60
ARGUMENTS = (
    *(f"--config.num_steps={NUM_STEPS}", "--config.model.num_layers=1", "--start_timeout=45"),
    *("--config.checkpoint_every=3", "--config.keep_checkpoints=1", "--config.eval_every=5", "--config.eval_batches=1"),
)
OPERATIONS = ("os.mkdir,os.rename", "os.remove,os.rmdir")  # of saving, and of deleting older checkpoints
MOST_OPERATIONS = 120  # of either, which a few saves and deletions take
MOST_STARTS = 60  # of one run, which has to progress
MOST_SECONDS = 250  # that processes may outlive a killed one: JAX detects its loss after 100
READ_PROGRAMS = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}  # a kill could cut off one that is written


@dataclass(frozen=True)
class Run:
    """The undisturbed run: its configuration's file, its folder, its processes, and its seconds to the first step."""

    config: Path
    workdir: Path
    number: int
    seconds: float


@pytest.fixture(scope="module", params=[1, 4])
def whole(config, request) -> Run:
    workdir, start = config.parent / f"whole{request.param}", time.monotonic()
    running = processes.start(config, workdir, *ARGUMENTS, number=request.param)
    processes.wait_until(processes.reached(workdir, 1), running)
    seconds = time.monotonic() - start
    results = processes.finish(running)
    assert [status for status, _ in results] == [0] * request.param, processes.report(results)
    return Run(config, workdir, request.param, seconds)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("signalled", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "terminated"])
def test_a_run_interrupted_at_random_instants_matches_the_undisturbed_run_bitwise(whole, signalled, request):
    rng, count = random.Random(request.config.getoption("--kills_seed")), 0
    for number in itertools.count():
        workdir = whole.workdir.with_name(f"{signalled.name}{whole.number}_{number}")
        for _ in range(MOST_STARTS):
            before = newest_checkpoint(workdir)
            if not interrupt(whole, workdir, signalled, rng):
                break
            count += 1
            assert newest_checkpoint(workdir) >= before
        else:
            pytest.fail(f"{workdir} is not complete after {MOST_STARTS} starts")
        processes.assert_equal_runs(workdir, whole.workdir)
        names = {path.name for path in workdir.iterdir() if path.suffix != ".old"}
        assert names <= {path.name for path in whole.workdir.iterdir()}
        if count >= request.config.getoption("--kills"):
            return


def interrupt(whole: Run, workdir: Path, signalled: signal.Signals, rng: random.Random) -> bool:
    """Start a run and interrupt it at a random instant; return False if it came to its end before.

    SIGKILL goes to one process or all of them, or the first kills itself at a file operation; the others then end with
    status 1, or with 0 if they had completed. SIGTERM goes to one, and all save and end with status 75; before its
    handler is set and after it is removed, SIGTERM acts as usual.
    """
    victims, operation = {rng.randrange(whole.number)}, ":0"
    if signalled == signal.SIGKILL:
        if rng.random() < 0.25:
            victims = {*range(whole.number)}
        if rng.random() < 0.3:
            operation, victims = f"{rng.choice(OPERATIONS)}:{rng.randrange(1, MOST_OPERATIONS)}", {0, *victims}
    started = processes.start(
        *(whole.config, workdir, *ARGUMENTS),
        number=whole.number,
        module=("support.disturbed", f"killed:{operation}", "noloco_jax.train"),
        variables=READ_PROGRAMS,
    )

    def sleep(seconds: float) -> None:
        end = time.monotonic() + seconds
        processes.wait_until(lambda: time.monotonic() >= end, started)

    is_early = operation == ":0" and rng.random() < 0.35
    if operation != ":0":
        processes.wait_until(lambda: False, started)
    elif is_early:
        sleep(rng.uniform(0, whole.seconds))
    else:
        step = min(newest_checkpoint(workdir) + rng.randint(1, 12), NUM_STEPS)
        lines = len(processes.metrics(workdir))
        processes.wait_until(lambda: len(processes.metrics(workdir)) != lines, started)  # of steps to be taken again
        processes.wait_until(processes.reached(workdir, step), started)
        sleep(rng.uniform(0, 0.1 if step < NUM_STEPS else 2))
    for victim in victims:
        if started[victim].poll() is None:
            started[victim].send_signal(signalled)
    results = processes.finish(started, MOST_SECONDS)
    statuses = [status for status, _ in results]
    if {statuses[victim] for victim in victims} == {0}:
        return False
    if signalled == signal.SIGKILL:
        assert {status for i, status in enumerate(statuses) if i not in victims} <= {0, 1}, processes.report(results)
    elif {*statuses} == {75}:
        assert newest_checkpoint(workdir) == last_step(workdir), processes.report(results)
    else:
        assert is_early or last_step(workdir) == NUM_STEPS, processes.report(results)
        assert {*statuses} <= {-signal.SIGTERM, 0, 1}, processes.report(results)
    return True


def newest_checkpoint(workdir: Path) -> int:
    return max((int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdigit()), default=0)


def last_step(workdir: Path) -> int:
    return max((line["step"] for line in processes.metrics(workdir)), default=0)
