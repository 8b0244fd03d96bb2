"""One line about a slow action, none about a fast one."""

import time

import pytest

from noloco_jax import patience
from noloco_jax.patience import told_if_slow


@pytest.mark.parametrize(("seconds", "told"), [(0.0, []), (0.3, ["reading"])])
def test_a_slow_action_is_reported_once_and_a_fast_one_never(monkeypatch, seconds, told):
    monkeypatch.setattr(patience, "SILENT_SECONDS", 0.05)
    lines: list[str] = []
    with told_if_slow("reading", lines.append):
        time.sleep(seconds)
    time.sleep(0.1)
    assert lines == told


def test_a_failed_action_is_not_reported_later(monkeypatch):
    monkeypatch.setattr(patience, "SILENT_SECONDS", 0.05)
    lines: list[str] = []
    with pytest.raises(ZeroDivisionError), told_if_slow("reading", lines.append):
        raise ZeroDivisionError
    time.sleep(0.1)
    assert lines == []
