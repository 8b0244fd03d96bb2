"""One line about a slow action, none about a fast one."""

import threading

import pytest

from noloco_jax import patience
from noloco_jax.patience import told_if_slow


def test_a_slow_action_is_reported_once(monkeypatch):
    monkeypatch.setattr(patience, "SILENT_SECONDS", 0.05)
    lines, told = [], threading.Event()
    with told_if_slow("reading", lambda line: lines.append(line) or told.set()):
        assert told.wait(300)
    assert lines == ["reading"]


def test_an_action_that_ends_or_fails_before_is_never_reported(monkeypatch):
    monkeypatch.setattr(patience, "SILENT_SECONDS", 60.0)
    lines, before = list[str](), {*threading.enumerate()}
    with told_if_slow("reading", lines.append):
        pass
    with pytest.raises(ZeroDivisionError), told_if_slow("reading", lines.append):
        raise ZeroDivisionError
    for timer in {*threading.enumerate()} - before:  # one that was not cancelled reports
        timer.join(300)
    assert lines == []
