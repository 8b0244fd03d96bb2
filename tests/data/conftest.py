"""Fixtures of the data tests."""

import pytest

from noloco_jax.data import reading
from noloco_jax.storage import retries


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch):
    """Report again what an earlier test of this process reported."""
    monkeypatch.setattr(reading, "_reported", set())
    monkeypatch.setattr(reading, "_left_out", set())


@pytest.fixture
def waits(monkeypatch):
    """Return the list of retry delays in seconds, which are recorded instead of waited for."""
    waited = []
    monkeypatch.setattr(retries, "sleep", waited.append)
    return waited
