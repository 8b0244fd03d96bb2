"""Lock of a workdir: by flock within one machine, by name between machines."""

import fcntl
import json
import os
from pathlib import Path

import pytest

from noloco_jax.cluster import workdir_lock
from noloco_jax.cluster.workdir_lock import LOCK_FILE, Holder, WorkdirLock
from noloco_jax.errors import UserError

ELSEWHERE = Holder("pod-7f", 12, "2026-01-02 03:04:05 +0000", "another boot")
KILLED_HERE = Holder("container", os.getpid(), "2026", workdir_lock._boot())


def write(workdir: Path, holder: Holder) -> Path:
    (workdir / LOCK_FILE).write_text(json.dumps(holder._asdict()) + "\n")
    return workdir / LOCK_FILE


def holder_of(workdir: Path) -> Holder | None:
    return workdir_lock._parse((workdir / LOCK_FILE).read_bytes())


def test_a_lock_names_its_holder_until_it_ends(tmp_path):
    with WorkdirLock(tmp_path / "run"):
        holder = holder_of(tmp_path / "run")
        assert holder is not None and (holder.host, holder.process) == (os.uname().nodename, os.getpid())
    assert holder_of(tmp_path / "run") is None and (tmp_path / "run" / LOCK_FILE).read_bytes() == b""


@pytest.mark.parametrize("force", [False, True])
def test_a_lock_held_on_this_machine_is_refused_at_once(tmp_path, force):
    with (
        WorkdirLock(tmp_path),
        pytest.raises(UserError, match=rf"in use by .*process {os.getpid()}") as refused,
    ):
        WorkdirLock(tmp_path, force=force).__enter__()
    assert refused.value.exit_status == 2


def test_a_process_that_was_killed_on_this_machine_holds_no_lock(tmp_path):
    write(tmp_path, KILLED_HERE)
    with WorkdirLock(tmp_path):
        assert holder_of(tmp_path) not in (None, KILLED_HERE)


def test_the_lock_of_another_machine_is_refused_by_name_until_it_is_forced(tmp_path):
    write(tmp_path, ELSEWHERE)
    assert holder_of(tmp_path) == ELSEWHERE
    with pytest.raises(UserError, match=r"locked by the trainer on pod-7f \(process 12.*--force_unlock") as refused:
        WorkdirLock(tmp_path).__enter__()
    assert refused.value.exit_status == 2
    assert holder_of(tmp_path) == ELSEWHERE
    with WorkdirLock(tmp_path, force=True):
        assert holder_of(tmp_path) != ELSEWHERE


def test_an_flock_that_a_file_system_keeps_for_a_lost_machine_yields_to_force(tmp_path):
    with write(tmp_path, ELSEWHERE).open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="locked by the trainer on pod-7f"):
            WorkdirLock(tmp_path).__enter__()
        with WorkdirLock(tmp_path, force=True):
            assert holder_of(tmp_path) != ELSEWHERE
