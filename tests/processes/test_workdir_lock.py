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
    r"stop it, or give another --workdir\n\Z"
)


@contextlib.contextmanager
def training_run(config: Path, workdir: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield the process of a run that is training and does not complete within the body."""
    [run] = processes.start(config, workdir, "--config.num_steps=9999", seconds_per_step=0.5)
    try:
        assert processes.wait_until(processes.reached(workdir, 2), [run])
        yield run
    finally:
        processes.kill([run])


def test_a_second_trainer_is_refused_only_while_the_first_is_alive(config, tmp_path):
    workdir = tmp_path / "run"
    with training_run(config, workdir) as first:
        [(status, output)] = processes.run(config, workdir)
        holder = re.search(IN_USE, output)
        assert (status, holder and int(holder[1])) == (2, first.pid), output
        assert first.poll() is None
        first.send_signal(signal.SIGKILL)
    assert (workdir / "trainer.lock").exists()
    saved = max((int(step.name) for step in (workdir / "checkpoints").iterdir() if step.name.isdigit()), default=0)
    [(status, output)] = processes.run(config, workdir, f"--config.num_steps={saved + 4}")
    assert (status, "trainer.lock" in output) == (0, False), output
    assert not (workdir / "trainer.lock").exists()
