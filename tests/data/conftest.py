"""Fixtures of the data tests."""

import pytest

from noloco_jax.data import reading


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch):
    """Report again what an earlier test of this process reported."""
    monkeypatch.setattr(reading, "_reported", set())
    monkeypatch.setattr(reading, "_left_out", set())
