"""A trainer on the workdir of another one ends with a one-line error."""

import os
import re

import pytest

from noloco_jax.cluster.workdir_lock import WorkdirLock
from support import processes

pytestmark = pytest.mark.timeout(900)
IN_USE = (
    r"error: \S+ is in use by the trainer on \S+ \(process (\d+), since \d{4}-\d\d-\d\d [^)]*\): wait for its end, "
    r"stop it, or give another --workdir\n\Z"
)


def test_a_trainer_is_refused_while_another_holds_the_workdir(config, tmp_path):
    with WorkdirLock(tmp_path / "run"):
        [(status, output)] = processes.run(config, tmp_path / "run")
    holder = re.search(IN_USE, output)
    assert (status, holder and int(holder[1])) == (2, os.getpid()), output
