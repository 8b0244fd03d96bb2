"""Lease of a workdir in a bucket: holding it, taking it over, and the exit of a holder that lost it."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from noloco_jax.cluster import workdir_lease
from noloco_jax.cluster.workdir_lease import WorkdirLease, lease_holder
from noloco_jax.cluster.workdir_lock import LOCK_FILE
from noloco_jax.errors import TransientError, UserError
from noloco_jax.storage import objects
from support import buckets
from support.paths import ROOT


@pytest.fixture(params=["s3", "gs"])
def address(request, servers, monkeypatch):
    yield buckets.new_bucket(servers(request.param), monkeypatch)
    buckets.forget()


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    for name, seconds in {"BEAT": 0.1, "SILENT": 60.0, "_POLL": 0.05, "_SETTLE": 0.3}.items():
        monkeypatch.setattr(workdir_lease, f"{name}_SECONDS", seconds)


@pytest.fixture
def silent_soon(monkeypatch):
    """Have a holder taken for dead soon, where none renews its lease: a busy machine may hold one up for as long."""
    monkeypatch.setattr(workdir_lease, "SILENT_SECONDS", 1.5)


def lease(address: str, folder: Path, report=print) -> WorkdirLease:
    """Return the lease of a trainer; trainers with different folders count as on different machines."""
    folder.mkdir(parents=True, exist_ok=True)
    return WorkdirLease(address, folder, report)


def test_a_lease_names_its_holder_and_is_released_on_exit(address, tmp_path):
    with lease(address, tmp_path):
        holder = lease_holder(address)
        assert holder is not None and (holder.host, holder.process) == (os.uname().nodename, os.getpid())
    assert lease_holder(address) is None


def test_a_renewed_lease_refuses_a_second_trainer(address, tmp_path):
    with lease(address, tmp_path / "a"), pytest.raises(UserError, match=rf"{address} is in use by .*{os.getpid()}"):
        lease(address, tmp_path / "b").__enter__()
    assert lease_holder(address) is None


@pytest.mark.usefixtures("silent_soon")
def test_the_lease_of_a_silent_holder_is_taken_over_after_an_announced_wait(address, tmp_path):
    lease(address, tmp_path / "a")._write()  # and is killed
    said, started = [], time.monotonic()
    with lease(address, tmp_path / "b", said.append):
        assert time.monotonic() - started >= workdir_lease.SILENT_SECONDS
    assert len(said) == 1 and f"{address}/{LOCK_FILE} is of the trainer on" in said[0]


def test_the_lease_of_a_killed_holder_of_the_same_folder_is_taken_over_at_once(address, tmp_path):
    killed = lease(address, tmp_path)
    killed._write()
    with lease(address, tmp_path, pytest.fail) as held:  # which fails where it would have to watch for life
        assert held._is_mine(workdir_lease._read(address)) and not killed._is_mine(workdir_lease._read(address))


@pytest.mark.parametrize("content", [b"{", b'{"holder": {"name": "a trainer of another version"}}'])
def test_an_unreadable_lease_is_refused(address, tmp_path, content):
    objects.write_object(f"{address}/{LOCK_FILE}", content)
    with pytest.raises(UserError, match="damaged, or of another version: delete it"):
        lease(address, tmp_path).__enter__()
    assert objects.read_object(f"{address}/{LOCK_FILE}") == content


def test_a_released_lease_is_not_renewed(address, tmp_path):
    with lease(address, tmp_path) as held:
        pass
    with pytest.raises(TransientError, match="given back"):
        held.check()
    assert lease_holder(address) is None


def test_a_deleted_lease_is_written_again(address, tmp_path):
    with lease(address, tmp_path) as held:
        objects.delete_object(f"{address}/{LOCK_FILE}")
        held.check()
        assert lease_holder(address) is not None


class Rival(WorkdirLease):
    """Lease of one of two trainers: both find none, and both write theirs before either looks at what is there."""

    together: threading.Barrier

    def _write(self) -> None:
        is_first = self._lease.beat == 0
        if is_first:
            self.together.wait()
        super()._write()
        if is_first:
            self.together.wait()


def test_one_of_two_simultaneous_trainers_gets_the_lease(address, tmp_path, monkeypatch):
    monkeypatch.setattr(Rival, "together", threading.Barrier(2, timeout=60), raising=False)
    over, held, refused = threading.Event(), [], []

    def take(name: str) -> None:
        (tmp_path / name).mkdir()
        try:
            with Rival(address, tmp_path / name, print):
                held.append(name)
                over.wait(60)
        except UserError as error:
            refused.append(error)
            over.set()

    threads = [threading.Thread(target=take, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(held), len(refused)) == (1, 1)


@pytest.mark.usefixtures("silent_soon")
@pytest.mark.parametrize("address", ["s3"], indirect=True)
def test_a_holder_that_lost_its_lease_exits_without_publishing(address, tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from noloco_jax.cluster import workdir_lease\n"
        "workdir_lease.BEAT_SECONDS, workdir_lease._SETTLE_SECONDS = 3600.0, 0.0\n"
        "with workdir_lease.WorkdirLease(sys.argv[1], Path(sys.argv[2]), print) as held:\n"
        "    print('held', flush=True); sys.stdin.readline(); held.check(); print('published', flush=True)\n"
    )
    (tmp_path / "a").mkdir()
    command = [sys.executable, "-c", program, address, str(tmp_path / "a")]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as held_up:
        assert held_up.stdout is not None and held_up.stdout.readline() == "held\n"
        with lease(address, tmp_path / "b"):  # takes over, having seen no renewal
            said, errors = held_up.communicate("\n", timeout=60)
            assert (held_up.returncode, said) == (2, "")
            assert f"error: {address}/{LOCK_FILE} is now of the trainer on" in errors
            assert lease_holder(address) is not None
