"""Error relay: an error of one process ends all. The processes are threads here, and their service is a dict."""

import time

import pytest
from jax._src import distributed

from noloco_jax.cluster import error_relay
from noloco_jax.cluster.error_relay import ErrorRelay
from noloco_jax.errors import StartError, TransientError, UserError


class Service:
    """Part of JAX's coordination service that the relay uses."""

    def __init__(self):
        self._values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str) -> None:
        self._values[key] = value

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in self._values.items() if key.startswith(folder)]

    def wait_at_barrier(self, name: str, timeout_ms: int) -> None:
        pass


@pytest.mark.parametrize("error", [UserError, StartError, TransientError])
def test_an_error_of_one_process_ends_all_with_its_status_and_line(error, monkeypatch, capsys):
    statuses = []
    monkeypatch.setattr(distributed.global_state, "client", Service())
    monkeypatch.setattr(error_relay, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(error_relay, "_SERVICE_SECONDS", 0)
    monkeypatch.setattr(error_relay.os, "_exit", statuses.append)
    relays = [ErrorRelay(process) for process in range(3)]
    relays[1].ignore_others()
    relays[1].end_all("the file is away", error.exit_status)
    deadline = time.monotonic() + 10
    while len(statuses) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    for relay in relays:
        relay.close()
    assert statuses == [error.exit_status] * 3
    assert capsys.readouterr().err == "error: the file is away\n" * 3
