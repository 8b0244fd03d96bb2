"""One line about a slow action, none about a fast one."""

import threading
from types import SimpleNamespace

import pytest

from noloco_jax import patience
from noloco_jax.patience import told_if_slow


@pytest.fixture
def timers(monkeypatch) -> list[threading.Timer]:
    """Return the timers that the test makes, which it can wait for: each is over once it reports or is cancelled."""
    made: list[threading.Timer] = []

    def timer(*arguments) -> threading.Timer:
        made.append(threading.Timer(*arguments))
        return made[-1]

    monkeypatch.setattr(patience, "threading", SimpleNamespace(Timer=timer))  # other modules keep their own
    return made


def test_a_slow_action_is_reported_once(monkeypatch, timers):
    monkeypatch.setattr(patience, "SILENT_SECONDS", 0.05)
    lines: list[str] = []
    with told_if_slow("reading", lines.append):
        timers[0].join(300)
    assert lines == ["reading"] and len(timers) == 1


def test_an_action_that_ends_or_fails_before_is_never_reported(monkeypatch, timers):
    monkeypatch.setattr(patience, "SILENT_SECONDS", 60.0)
    lines: list[str] = []
    with told_if_slow("reading", lines.append):
        pass
    with pytest.raises(ZeroDivisionError), told_if_slow("reading", lines.append):
        raise ZeroDivisionError
    for timer in timers:
        timer.join(300)
        assert not timer.is_alive()
    assert lines == [] and len(timers) == 2
