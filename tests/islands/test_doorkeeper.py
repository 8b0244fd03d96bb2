"""Strangers' connections at an island's port: they take neither its files nor its memory, nor fill its log."""

import contextlib
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import trustme
from pyarrow import flight

from noloco_jax.islands import doorkeeper
from noloco_jax.islands.channel import Opening, encode
from noloco_jax.islands.doorkeeper import Limited, connections
from noloco_jax.islands.frames import SCHEMA, _seal
from noloco_jax.islands.keys import Credentials
from noloco_jax.islands.peer_errors import EndedError
from support.counted import in_time
from support.islands import Recorder, calling, keys_of, nothing, running
from support.paths import ROOT
from support.served import EXPECTED

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at sockets as Linux lists them")


class Served(NamedTuple):
    process: subprocess.Popen[str]
    port: int
    keys: Credentials

    def end(self) -> tuple[int, int, int]:
        """Return how often it could open no files, its highest memory in MiB, and the lines that it reported."""
        failed, memory, lines = self.process.communicate(timeout=60)[0].split()
        return int(failed), int(memory), int(lines)


@pytest.fixture
def served(tmp_path) -> Iterator[Served]:
    """A server with at most 1,024 open files, the hard limit too."""
    ca = trustme.CA()
    for file, content in zip(("ca.pem", "cert.pem", "key.pem"), keys_of(ca, "paris")[:3], strict=True):
        (tmp_path / file).write_bytes(content)
        (tmp_path / file).chmod(0o600)
    command = f"ulimit -n 1024; exec {sys.executable} -m support.served {tmp_path}"
    with subprocess.Popen(
        ["bash", "-c", command], cwd=ROOT / "tests", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield Served(process, int(process.stdout.readline()), keys_of(ca, "berlin"))
        finally:
            process.kill()


def silent(port: int, count: int) -> list[socket.socket]:
    """Open connections that say nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, count + 2048)), hard))
    return [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(count)]


def test_silent_strangers_take_no_files_of_an_island_and_keep_no_peer_out(served):
    strangers = silent(served.port, 1100)
    try:
        for _ in range(5):
            assert calling(served.port, served.keys).action("status", {"a": 1}, 30.0)
            time.sleep(0.2)
    finally:
        for stranger in strangers:
            stranger.close()
    failed, _, _ = served.end()
    assert failed < 20  # some while 1,100 connections are taken at once, and never again


def without_limits(served: Served) -> flight.FlightClient:
    """Return a client of island berlin that sends messages of any size."""
    return flight.FlightClient(
        f"grpc+tls://127.0.0.1:{served.port}",
        tls_root_certs=served.keys.authority,
        cert_chain=served.keys.certificate,
        private_key=served.keys.key,
        override_hostname="paris",
        generic_options=[("grpc.max_send_message_length", -1)],
    )


def test_an_opening_that_is_too_long_is_cut_off_before_it_takes_memory(served):
    keys = served.keys
    assert calling(served.port, keys).action("status", {}, 30.0)
    with without_limits(served) as client:
        descriptor = flight.FlightDescriptor.for_command(b"1" * (400 << 20))
        with pytest.raises(flight.FlightError), contextlib.closing(client.do_exchange(descriptor)[0]) as writer:
            writer.done_writing()
            writer.close()
    assert calling(served.port, keys).action("status", {}, 30.0)
    _, memory, _ = served.end()
    assert memory < 500


def test_a_piece_of_a_message_that_is_too_long_is_cut_off_before_it_takes_memory(served):
    """The member's call was admitted, and its header announced the right length."""
    opening = encode(Opening("exchange", "berlin", "paris", 60.0, {}))
    with without_limits(served) as client, pytest.raises(flight.FlightError):
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(opening))
        with writer:
            writer.begin(SCHEMA)
            header = {"kind": "frame", "header": {}, "arrays": [[EXPECTED.dtype.name, list(EXPECTED.shape)]]}
            writer.write_metadata(_seal(header))
            column = pa.array(np.zeros(800 << 20, np.uint8))
            writer.write_batch(pa.RecordBatch.from_arrays([column], schema=SCHEMA))
            reader.read_chunk()
    assert calling(served.port, served.keys).action("status", {}, 30.0)
    _, memory, _ = served.end()
    assert memory < 500


def test_a_message_may_be_longer_than_any_piece_of_it(served):
    arrays = [np.zeros(EXPECTED.shape, EXPECTED.dtype)]
    with calling(served.port, served.keys).exchange({}, nothing, 120.0) as channel:
        channel.send({}, arrays)
        with pytest.raises(EndedError):
            channel.receive()


def test_a_stranger_that_says_nothing_is_hung_up_on_and_a_call_that_lasts_is_not(monkeypatch):
    monkeypatch.setattr(doorkeeper, "_HANDSHAKE_SECONDS", 0.5)
    recorder = Recorder()

    def exchange(caller, hello, connect):
        channel = connect(lambda _: None)
        channel.receive()
        channel.send({"still": "here"})

    recorder.exchange = exchange
    with running(recorder) as server, calling(server.port).exchange({}, lambda _: None, 60.0) as channel:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as stranger:
            assert in_time(lambda: len(list(connections(server.port))) == 2)
            assert stranger.recv(1 << 16) is not None
            while stranger.recv(1 << 16):  # gRPC's greeting, and then the end
                pass
        channel.send({"are you": "there"})
        assert channel.receive().header == {"still": "here"}


def test_what_is_reported_is_limited_and_the_rest_is_counted(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lines: list[str] = []
    report = Limited(lines.append, 3)
    for number in range(10):
        report(f"line {number}")
    assert lines == ["line 0", "line 1", "line 2"]
    now[0] += 61.0
    report("later")
    assert lines[3:] == ["7 more calls were refused or failed, and are not listed", "later"]
