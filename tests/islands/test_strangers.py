"""Refusal of strangers to a run, with a line on both sides, and incomplete messages that leak nothing.

`test_calls.py` tests each single call; these are whole islands, which keep training.
"""

import contextlib
import dataclasses
import datetime
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import trustme

from noloco_jax.errors import UserError
from noloco_jax.islands import calls
from noloco_jax.islands.client import Client
from noloco_jax.islands.frames import SCHEMA, ArraySpec, _seal
from noloco_jax.islands.keys import Credentials
from noloco_jax.islands.peer_errors import PeerError, RefusedError
from noloco_jax.islands.protocol.events import Open
from noloco_jax.islands.protocol.messages import VERSION, Header, StatusRequest, to_json
from support.counted import descriptors, in_time, resident, settled
from support.island_world import IDENTITY
from support.islands import Recorder, calling, keys_of, nothing, running
from support.rosters import on_loopback
from support.sites import Site, side_by_side

NAMES = ("berlin", "paris")


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


def keys_with_fault(ca: trustme.CA, fault: str) -> Credentials | None:
    """Make the credentials of an island that calls itself berlin."""
    if fault == "none":
        return None
    if fault == "expired":
        past = {"not_before": datetime.datetime(2020, 1, 1), "not_after": datetime.datetime(2021, 1, 1)}
        return keys_of(ca, "berlin", **past)
    return keys_of(ca, "berlin")


def later_protocol_json(header: Header) -> dict[str, Any]:
    """Return a header as an island of a later protocol sends it, without fields that are read here."""
    values = to_json(header)
    identity = values.get("identity") or {}
    if identity.get("protocol") == 9:
        values |= {"identity": {"protocol": 9, "runs": [identity["run"]]}}
    return values


@pytest.mark.parametrize(
    ("fault", "to_the_stranger", "to_the_island"),
    [
        ("none", "asks for keys: give --keys here", "does not speak TLS as islands do"),
        ("expired", "this island's certificate, which expired on 2021-01-01", "certificate expired on 2021-01-01"),
        ("another run", "run: other here, run at paris", "berlin was refused: run: run here, other at berlin"),
        (
            "another protocol",
            f"protocol: 9 here, {VERSION} at paris .install one version of noloco_jax on both.",
            f"berlin was refused: protocol: {VERSION} here, 9 at berlin (install one version of noloco_jax on both)",
        ),
        (
            "a later form",
            f"protocol: 9 of the caller, {VERSION} of the island called .install one version of noloco_jax on both.",
            f"berlin was refused: protocol: 9 of the caller, {VERSION} of the island called (install one version",
        ),
    ],
)
def test_a_refused_stranger_and_the_called_island_both_report_the_fault(
    ca, fault, to_the_stranger, to_the_island, monkeypatch
):
    roster = on_loopback(*NAMES)
    island = Site("paris", roster, credentials=keys_of(ca, "paris"))
    changes = {"another run": {"run": "other"}, "another protocol": {"protocol": 9}, "a later form": {"protocol": 9}}
    identity = dataclasses.replace(IDENTITY, **changes.get(fault, {}))
    if fault == "a later form":
        monkeypatch.setattr(calls, "to_json", later_protocol_json)
    stranger = Site("berlin", roster, credentials=keys_with_fault(ca, fault), identity=identity)
    try:
        island.open()
        if fault in changes:
            with pytest.raises(UserError, match=to_the_stranger):
                stranger.open()
        else:
            stranger.open()
            side_by_side(lambda: island.train(3, 0.4), lambda: stranger.train(3, 0.4))
            assert in_time(lambda: any(to_the_stranger in line for line in stranger.lines)), stranger.lines
        assert in_time(lambda: any(to_the_island in line for line in island.lines)), island.lines
        assert not any("\n" in line for line in (*island.lines, *stranger.lines))
        assert island.corrections == {} and stranger.corrections == {}
    finally:
        side_by_side(island.close, stranger.close)


class AnswersOf:
    """Client whose calls end one after another as given: with a refusal's text, or, where it is empty, well."""

    def __init__(self, *ends: str):
        self.ends = list(ends)

    @contextlib.contextmanager
    def exchange(self, *_: Any) -> Iterator[Any]:
        if end := self.ends.pop(0):
            raise RefusedError(end)
        yield SimpleNamespace(when_ready=lambda look: None, cancel=lambda: None)  # ten seconds after its end


def test_a_refusal_of_every_call_is_reported_once_until_it_changes_or_a_call_succeeds():
    """Guard a regression: an island wrote about one line a second for as long as a peer's keys had expired."""
    client: Any = AnswersOf("expired", "expired", "expired", "foreign", "", "foreign", "foreign")
    lines: list[str] = []
    ended = threading.Semaphore(0)
    nothing_read: Any = None  # no frame arrives
    listener = calls.Listener(lambda event, arrays: None, lambda key: ended.release(), nothing_read, lines.append)
    own = calls.Calls({"berlin": client}, lambda _: {}, lambda _: [], 60.0, threading.Condition(), listener)
    for number in range(len(client.ends)):
        own.dial(Open(("out", number), "berlin", StatusRequest()))
        own.end(("out", number))
        assert ended.acquire(timeout=60)
    assert lines == ["expired", "foreign", "foreign"]


EXPECTED = ArraySpec((64 << 20,), np.dtype(np.uint8))
PARTIAL = ("nothing", "a header", "a huge announcement", "a piece", "a piece, and the network gone", "a wrong trailer")


def send_incomplete(client: Client, kind: str) -> None:
    """Call as an admitted peer and send a part of a message, or a wrong one."""
    seconds = 0.1 if kind.endswith("gone") else 60.0
    with contextlib.suppress(PeerError, pa.ArrowException), client.exchange({}, nothing, seconds) as channel:
        writer, size = channel._writer, 1 << 50 if kind == "a huge announcement" else EXPECTED.nbytes
        if kind == "nothing":
            raise PeerError
        writer.write_metadata(_seal({"kind": "frame", "header": {}, "arrays": [["uint8", [size]]]}))
        if kind in ("a header", "a huge announcement"):
            raise PeerError
        column = pa.array(np.zeros(1 << 16, np.uint8))
        writer.write_batch(pa.RecordBatch.from_arrays([column], schema=SCHEMA))
        if kind == "a wrong trailer":
            writer.write_metadata(_seal({"bytes": 1 << 16, "digest": ""}))
        elif kind.endswith("gone"):
            channel.receive()  # waits for the deadline while the other side expects the rest of the message
        raise PeerError


def check_incomplete_messages(ca: trustme.CA | None, tries: int) -> None:
    keys = {name: None if ca is None else keys_of(ca, name) for name in NAMES}
    received: list[object] = []
    recorder = Recorder()
    recorder.exchange = lambda caller, hello, connect: received.append(connect(lambda _: [EXPECTED]).receive())
    with running(recorder, keys["paris"]) as server:
        client = calling(server.port, keys["berlin"])

        def send_all_kinds(number: int) -> None:
            for one in range(number):
                send_incomplete(client, PARTIAL[one % len(PARTIAL)])

        send_all_kinds(len(PARTIAL) * 3)  # warm-up: what is allocated once may stay
        before = settled(descriptors), settled(threading.active_count), resident()
        send_all_kinds(tries)
        assert client.action("status", {}, 60.0)
        assert in_time(lambda: settled(descriptors) <= before[0] + 5)
        assert in_time(lambda: settled(threading.active_count) <= before[1] + 3)
        assert resident() - before[2] < 64 << 20
    assert received == []


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux lists them")
def test_incomplete_messages_of_admitted_peers_leak_nothing(ca):
    check_incomplete_messages(ca, 5 * len(PARTIAL))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux lists them")
@pytest.mark.parametrize("is_tls", [True, False])
def test_ten_thousand_incomplete_messages_leak_nothing(ca, is_tls):
    check_incomplete_messages(ca if is_tls else None, 10_000)
