"""Lock of a workdir: by flock within one machine, and by the heartbeats of a holder on another machine."""

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from noloco_jax.cluster import workdir_lock
from noloco_jax.cluster.workdir_lock import LOCK_FILE, Holder, Watch, WorkdirLock, holder_of
from noloco_jax.errors import TransientError, UserError
from support.paths import ROOT

ELSEWHERE = Holder("pod-7f", 12, "2026-01-02 03:04:05 +0000", "another boot", 3)


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    for name, seconds in {"BEAT": 0.05, "FIRST_BEAT": 0.05, "SILENT": 60.0, "POLL": 0.02}.items():
        name = next(known for known in (f"{name}_SECONDS", f"_{name}_SECONDS") if hasattr(workdir_lock, known))
        monkeypatch.setattr(workdir_lock, name, seconds)


@pytest.fixture
def silent_soon(monkeypatch):
    """Have a holder taken for dead soon, where none shows life: a busy machine may hold one up for as long."""
    monkeypatch.setattr(workdir_lock, "SILENT_SECONDS", 1.0)


def write(workdir: Path, holder: Holder) -> Path:
    (workdir / LOCK_FILE).write_bytes(workdir_lock._line_of(holder))
    return workdir / LOCK_FILE


def test_a_lock_names_its_holder_and_is_deleted_on_exit(tmp_path):
    with WorkdirLock(tmp_path / "run", print):
        holder = holder_of(tmp_path / "run")
        assert holder is not None and (holder.host, holder.process) == (os.uname().nodename, os.getpid())
    assert list((tmp_path / "run").iterdir()) == []


def test_a_lock_held_on_this_machine_is_refused_at_once(tmp_path):
    with WorkdirLock(tmp_path, print), pytest.raises(UserError, match=rf"in use by .*process {os.getpid()}") as refused:
        WorkdirLock(tmp_path, pytest.fail).__enter__()
    assert refused.value.exit_status == 2


def test_a_lock_on_a_file_that_was_just_deleted_is_none(tmp_path, monkeypatch):
    """A holder that ends deletes its file, and another may make its own, between opening and locking the first."""
    lock = workdir_lock.try_lock
    other = WorkdirLock(tmp_path, pytest.fail)

    def overtaken(file: int) -> bool | None:
        monkeypatch.setattr(workdir_lock, "try_lock", lock)
        (tmp_path / LOCK_FILE).unlink()
        other.__enter__()
        return lock(file)

    monkeypatch.setattr(workdir_lock, "try_lock", overtaken)
    with pytest.raises(UserError, match="in use by"):
        WorkdirLock(tmp_path, pytest.fail).__enter__()
    other.__exit__()


def test_a_dead_process_holds_no_lock_even_if_its_pid_is_reused(tmp_path):
    mine = Holder("here", os.getpid(), "2026", workdir_lock._kernel(), tmp_path.stat().st_dev)
    write(tmp_path, mine)
    with WorkdirLock(tmp_path, pytest.fail):
        assert holder_of(tmp_path) != mine


def test_watch_reports_a_holder_on_this_machine_while_it_is_alive(tmp_path):
    watch = Watch(tmp_path)
    assert watch.holder() is None
    with WorkdirLock(tmp_path, pytest.fail):
        assert watch.holder() == holder_of(tmp_path)
        with WorkdirLock(tmp_path / "another", pytest.fail):  # watching took no lock
            assert watch.holder() is not None
    write(tmp_path, Holder("here", os.getpid(), "2026", workdir_lock._kernel(), tmp_path.stat().st_dev))
    assert watch.holder() is None  # killed: its line is left


@pytest.mark.usefixtures("silent_soon")
def test_watch_reports_a_holder_on_another_machine_while_it_sends_heartbeats(tmp_path):
    path, watch = write(tmp_path, ELSEWHERE), Watch(tmp_path)
    for beat in range(10):
        os.utime(path, (beat, beat))
        assert watch.holder() == ELSEWHERE
        time.sleep(0.2)
    time.sleep(workdir_lock.SILENT_SECONDS)
    assert watch.holder() is None


@pytest.mark.usefixtures("silent_soon")
def test_the_lock_of_a_silent_remote_holder_is_taken_over_after_an_announced_wait(tmp_path):
    path, said = write(tmp_path, ELSEWHERE), []
    os.utime(path, (0, time.time() + 9e5))  # the holder's clock may be wrong
    started = time.monotonic()
    with WorkdirLock(tmp_path, said.append):
        assert time.monotonic() - started >= workdir_lock.SILENT_SECONDS
    [line] = said
    assert "of the trainer on pod-7f (process 12, since 2026-01-02 03:04:05 +0000)" in line and "waits 1 s" in line


def test_a_lock_with_heartbeats_from_another_machine_is_refused(tmp_path):
    path, is_over = write(tmp_path, ELSEWHERE), threading.Event()

    def live() -> None:
        while not is_over.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(UserError, match="in use by the trainer on pod-7f") as refused:
            WorkdirLock(tmp_path, lambda line: None).__enter__()
    finally:
        is_over.set()
        thread.join()
    assert refused.value.exit_status == 2
    assert holder_of(tmp_path) == ELSEWHERE


@pytest.mark.usefixtures("silent_soon")
def test_an_flock_kept_for_a_lost_machine_is_a_transient_error(tmp_path):
    with write(tmp_path, ELSEWHERE).open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(TransientError, match=r"is locked by the trainer on pod-7f .* delete that file"):
            WorkdirLock(tmp_path, lambda line: None).__enter__()


def test_a_held_lock_is_refused_on_a_file_system_without_flock(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir_lock, "try_lock", lambda file: None)
    with WorkdirLock(tmp_path, pytest.fail), pytest.raises(UserError, match="is in use by"):
        WorkdirLock(tmp_path, lambda line: None).__enter__()


def test_a_holder_sends_heartbeats_and_takes_a_deleted_lock_again(tmp_path):
    with WorkdirLock(tmp_path, print):
        path = tmp_path / LOCK_FILE
        before = path.stat().st_mtime_ns
        wait_until(lambda: path.stat().st_mtime_ns > before)
        path.unlink()
        wait_until(lambda: holder_of(tmp_path) is not None)
        with pytest.raises(UserError, match="is in use by"):
            WorkdirLock(tmp_path, print).__enter__()


def test_a_holder_that_lost_its_lock_exits_at_once_with_one_line(tmp_path):
    program = f"""
import sys, time
from pathlib import Path
from noloco_jax.cluster import workdir_lock
workdir_lock._FIRST_BEAT_SECONDS = 0.2
with workdir_lock.WorkdirLock(Path({str(tmp_path)!r}), print):
    Path({str(tmp_path / LOCK_FILE)!r}).write_bytes({workdir_lock._line_of(ELSEWHERE)!r})
    time.sleep(60)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=50)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1), ended.stderr
    assert f"{LOCK_FILE} is now of the trainer on pod-7f" in ended.stderr
    assert holder_of(tmp_path) == ELSEWHERE


def test_at_most_one_of_many_simultaneous_processes_holds_the_lock(tmp_path):
    """Each process logs its pid after taking and before releasing the lock: the two lines must be adjacent."""
    program = f"""
import os, sys, time
from pathlib import Path
from noloco_jax.cluster import workdir_lock
from noloco_jax.errors import UserError
log = os.open({str(tmp_path / "log")!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
sys.stdin.readline()
for _ in range(20):
    try:
        with workdir_lock.WorkdirLock(Path({str(tmp_path / "run")!r}), print):
            os.write(log, b"%d\\n" % os.getpid())
            time.sleep(0.01)
            os.write(log, b"%d\\n" % os.getpid())
    except UserError:
        pass
"""
    started = [subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, cwd=ROOT) for _ in range(3)]
    time.sleep(1)  # until all have imported what they need
    for process in started:
        process.stdin.write(b"\n")  # type: ignore[union-attr]
        process.stdin.close()  # type: ignore[union-attr]
    assert [process.wait(100) for process in started] == [0] * 3
    numbers = (tmp_path / "log").read_text().split()
    assert numbers[::2] == numbers[1::2] and len(numbers) >= 30


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
