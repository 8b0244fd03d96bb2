"""Hostile connections to an island's port: they exhaust neither its file descriptors, nor its memory, nor its log."""

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
        """Return the number of failed file opens, the peak memory in MiB, and the number of lines reported."""
        failed, memory, lines = self.process.communicate(timeout=60)[0].split()
        return int(failed), int(memory), int(lines)


@pytest.fixture
def served(tmp_path) -> Iterator[Served]:
    """A server whose soft and hard limits are 1,024 open files."""
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


def silent_connections(port: int, count: int) -> list[socket.socket]:
    """Open `count` connections that send nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, count + 2048)), hard))
    return [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(count)]


def test_silent_connections_exhaust_no_file_descriptors_and_keep_no_peer_out(served):
    strangers = silent_connections(served.port, 1100)
    try:
        for _ in range(5):
            assert calling(served.port, served.keys).action("status", {"a": 1}, 30.0)
            time.sleep(0.2)
    finally:
        for stranger in strangers:
            stranger.close()
    failed, _, _ = served.end()
    assert failed < 20  # only while 1,100 connections are accepted at once


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


def test_an_oversized_opening_is_cut_off_before_it_takes_memory(served):
    keys = served.keys
    assert calling(served.port, keys).action("status", {}, 30.0)
    with without_limits(served) as client:
        descriptor = flight.FlightDescriptor.for_command(b"1" * (128 << 20))
        with pytest.raises(flight.FlightError), contextlib.closing(client.do_exchange(descriptor)[0]) as writer:
            writer.done_writing()
            writer.close()
    assert calling(served.port, keys).action("status", {}, 30.0)
    _, memory, _ = served.end()
    assert memory < 500


def test_an_oversized_message_piece_is_cut_off_before_it_takes_memory(served):
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


def test_a_large_message_in_pieces_is_accepted(served):
    arrays = [np.zeros(EXPECTED.shape, EXPECTED.dtype)]
    with calling(served.port, served.keys).exchange({}, nothing, 120.0) as channel:
        channel.send({}, arrays)
        with pytest.raises(EndedError):
            channel.receive()


def test_a_silent_connection_is_closed_and_a_long_call_is_not(monkeypatch):
    recorder = Recorder()

    def exchange(caller, hello, connect):
        channel = connect(lambda _: None)
        for answer in ("here", "still here"):
            channel.receive()
            channel.send({"i am": answer})

    recorder.exchange = exchange
    with running(recorder) as server, calling(server.port).exchange({}, lambda _: None, 60.0) as channel:
        channel.send({"are you": "there"})
        assert channel.receive().header == {"i am": "here"}
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as stranger:
            assert in_time(lambda: len(list(connections(server.port))) == 2)
            monkeypatch.setattr(doorkeeper, "_HANDSHAKE_SECONDS", 0.5)  # not before: a busy machine may need longer
            assert stranger.recv(1 << 16) is not None
            while stranger.recv(1 << 16):  # gRPC's greeting, then the end of the stream
                pass
        channel.send({"are you": "there"})
        assert channel.receive().header == {"i am": "still here"}


def test_every_open_file_is_counted():
    """In a process of its own: threads of earlier tests may close files here meanwhile."""
    program = """
from noloco_jax.islands.doorkeeper import number_of_descriptors
before = number_of_descriptors()
opened = [open("/dev/null") for _ in range(20)]
print(number_of_descriptors() - before)
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout == "20\n"


def test_reports_are_rate_limited_and_suppressed_ones_are_counted(monkeypatch):
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
