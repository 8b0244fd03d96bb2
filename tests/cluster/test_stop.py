"""Requests to stop a run: signals to this process alone, and the agreement of several."""

import signal
import subprocess
import sys

import pytest

from noloco_jax.cluster.processes import OneProcess, Processes
from noloco_jax.cluster.stop import Stop
from support.paths import ROOT


@pytest.mark.parametrize(
    ("number", "status", "reason"),
    [
        (signal.SIGTERM, 75, "stopped by SIGTERM"),
        (signal.SIGHUP, 75, "stopped by SIGHUP"),
        (signal.SIGINT, 130, "stopped by Ctrl-C"),
    ],
)
def test_a_signal_stops_a_process_after_its_step(number, status, reason):
    with Stop(OneProcess()) as stop:
        assert not stop.is_due()
        signal.raise_signal(number)
        assert stop.is_due()
    assert (stop.exit_status, stop.reason) == (status, reason)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_announced_while_the_main_thread_is_inside_one_call(number):
    """As in a compilation: Python runs no handler of its own there."""
    program = f"""
import hashlib, os, threading
from noloco_jax.cluster.processes import OneProcess
from noloco_jax.cluster.stop import Stop

with Stop(OneProcess()) as stop:
    stop.current = "step 7"
    threading.Timer(0.3, os.kill, (os.getpid(), {int(number)})).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)
    print("handlers may run", flush=True)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    again = "; Ctrl-C again ends it now, without saving" if number == signal.SIGINT else ""
    lines = [f"{name}: the run saves and stops after step 7{again}", "handlers may run"]
    assert done.stdout.splitlines() == lines


def test_a_second_ctrl_c_ends_a_process_at_once():
    with Stop(OneProcess()):
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL


def test_a_second_sigterm_does_not_cut_off_a_save():
    with Stop(OneProcess()) as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_due()


def test_signal_handlers_are_restored_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with Stop(OneProcess()):
        signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


class Agreed(OneProcess):
    """Several processes that have agreed to stop at the second call."""

    alone = False
    calls = 0

    def agree_to_stop(self, received: bool) -> bool:
        self.calls += 1
        return self.calls == 2


def test_several_processes_stop_when_they_agree_and_leave_signals_to_jax():
    processes: Processes = Agreed()
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with Stop(processes) as stop:
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
        assert [stop.is_due() for _ in range(2)] == [False, True]
    assert (stop.exit_status, stop.reason) == (75, "stopped by SIGTERM")


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop(OneProcess()) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.is_due()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_hangup_of_one_of_several_processes_is_forwarded_as_sigterm():
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with Stop(Agreed()):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]
