"""Concurrent trainers on one workdir, started as by a user: one trains, the others end with a one-line error."""

import contextlib
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import processes

pytestmark = pytest.mark.timeout(900)
IN_USE = (
    r"error: \S+ is in use by the trainer on \S+ \(process (\d+), since \d{4}-\d\d-\d\d [^)]*\): wait for its end, "
    r"stop it, or give another --workdir( \(process 0 on \S+\))?\n\Z"
)


@contextlib.contextmanager
def training_run(config: Path, workdir: Path, number: int = 1) -> Iterator[list[subprocess.Popen[str]]]:
    """Yield the processes of a run that is training and does not complete within the body."""
    run = processes.start(config, workdir, "--config.num_steps=9999", number=number, seconds_per_step=0.5)
    try:
        assert processes.wait_until(processes.reached(workdir, 2), run)
        yield run
    finally:
        processes.kill(run)


@pytest.mark.parametrize("number", [1, 2])
def test_a_second_trainer_is_refused_only_while_the_first_is_alive(config, tmp_path, number):
    workdir = tmp_path / "run"
    with training_run(config, workdir, number) as first:
        results = processes.run(config, workdir, number=number)
        assert [status for status, _ in results] == [2] * number, processes.report(results)
        holders = [re.search(IN_USE, output) for _, output in results]
        assert [match and int(match[1]) for match in holders] == [first[0].pid] * number, processes.report(results)
        assert all(process.poll() is None for process in first)
        for process in first:
            process.send_signal(signal.SIGKILL)
    assert (workdir / "trainer.lock").exists()
    saved = max((int(step.name) for step in (workdir / "checkpoints").iterdir() if step.name.isdigit()), default=0)
    results = processes.run(config, workdir, f"--config.num_steps={saved + 4}", number=number)
    assert [status for status, _ in results] == [0] * number, processes.report(results)
    assert "trainer.lock" not in results[0][1]
    assert not (workdir / "trainer.lock").exists()


def test_exactly_one_of_several_simultaneous_trainers_trains(config, tmp_path):
    workdir = tmp_path / "run"
    trainers = [processes.start(config, workdir, "--config.num_steps=8", seconds_per_step=0.5)[0] for _ in range(3)]
    results = processes.finish(trainers)
    assert sorted(status for status, _ in results) == [0, 2, 2], processes.report(results)
    assert [line["step"] for line in processes.metrics(workdir) if line["kind"] == "train"] == [*range(1, 9)]
