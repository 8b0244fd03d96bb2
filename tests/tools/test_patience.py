"""One line about what takes long, none about what does not."""

import time

import pytest

from noloco_jax import patience
from noloco_jax.patience import told_if_slow


@pytest.mark.parametrize(("seconds", "told"), [(0.0, []), (0.3, ["reading"])])
def test_what_takes_long_is_told_once(monkeypatch, seconds, told):
    monkeypatch.setattr(patience, "SILENT_SECONDS", 0.05)
    lines: list[str] = []
    with told_if_slow("reading", lines.append):
        time.sleep(seconds)
    time.sleep(0.1)
    assert lines == told


def test_what_fails_is_told_no_more(monkeypatch):
    monkeypatch.setattr(patience, "SILENT_SECONDS", 0.05)
    lines: list[str] = []
    with pytest.raises(ZeroDivisionError), told_if_slow("reading", lines.append):
        raise ZeroDivisionError
    time.sleep(0.1)
    assert lines == []
