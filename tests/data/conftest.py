"""Fixtures of the data tests."""

import pytest

from noloco_jax import storage
from noloco_jax.data import find_files


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch):
    """Report again what an earlier test of this process reported."""
    monkeypatch.setattr(find_files, "_reported", set())
    monkeypatch.setattr(find_files, "_left_out", set())


@pytest.fixture
def waits(monkeypatch):
    """Return the list of retry delays in seconds, which are recorded instead of waited for."""
    waited = []
    monkeypatch.setattr(storage, "sleep", waited.append)
    return waited
