"""One line about a slow action, none about a fast one."""

import threading
from types import SimpleNamespace

import pytest

from noloco_jax import patience
from noloco_jax.patience import told_if_slow


class KeptTimer(threading.Timer):
    """Timer that a test can wait for: it is over once it has reported, or is cancelled."""

    made: list[threading.Timer]

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.made.append(self)


@pytest.fixture
def timers(monkeypatch) -> list[threading.Timer]:
    """Return the timers that the test makes, none of which reports within a minute unless it shortens that."""
    monkeypatch.setattr(KeptTimer, "made", [], raising=False)
    monkeypatch.setattr(patience, "threading", SimpleNamespace(Timer=KeptTimer))  # other modules keep their own
    monkeypatch.setattr(patience, "SILENT_SECONDS", 60.0)
    return KeptTimer.made


def test_a_slow_action_is_reported_once(monkeypatch, timers):
    monkeypatch.setattr(patience, "SILENT_SECONDS", 0.05)
    lines: list[str] = []
    with told_if_slow("reading", lines.append):
        (timer,) = timers
        timer.join(300)
    assert not timer.is_alive() and lines == ["reading"]


def test_a_fast_action_is_never_reported(timers):
    lines: list[str] = []
    with told_if_slow("reading", lines.append):
        pass
    (timer,) = timers
    timer.join(300)
    assert not timer.is_alive() and lines == []


def test_a_failed_action_is_not_reported_later(timers):
    lines: list[str] = []
    with pytest.raises(ZeroDivisionError), told_if_slow("reading", lines.append):
        raise ZeroDivisionError
    (timer,) = timers
    timer.join(300)
    assert not timer.is_alive() and lines == []
