"""Calls over failing networks and to failing processes: no incomplete message is accepted, and no call hangs."""

import contextlib
import gc
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import trustme

from noloco_jax.islands import probe
from noloco_jax.islands.client import Client
from noloco_jax.islands.frames import PIECE_BYTES, ArraySpec
from noloco_jax.islands.keys import Newest
from noloco_jax.islands.peer_errors import BrokenError, LateError, PeerError
from noloco_jax.islands.roster import Address, Island, Roster
from noloco_jax.islands.server import Server
from support.counted import descriptors, in_time, resident, settled
from support.fault_proxy import Direction, FaultProxy
from support.islands import NAMES, Recorder, calling, keys_of, running
from support.paths import ROOT
from support.ports import free_ports

PATIENCE = 120.0  # seconds: cores may be few and busy
SILENT: list[set[Direction]] = [{"up", "down"}, {"up"}, {"down"}]
MESSAGE = np.random.default_rng(0).integers(0, 256, 2 << 20, dtype=np.uint8)


def expects(header):
    return [ArraySpec(MESSAGE.shape, MESSAGE.dtype)] if header.get("data") else None


class Pair:
    """Call from berlin to paris over a faulty network; each side sends a message and receives one.

    Attributes:
      proxy: the network.
      got: arrays that each island received whole.
      errors: error that ended each island's part of the call.
    """

    def __init__(self, proxy: FaultProxy, recorder: Recorder, keys):
        self.proxy = proxy
        self.got = {}
        self.errors = {}
        self.greeted = threading.Event()
        self.go_on = threading.Event()
        self._paris_done = threading.Event()
        self._client = calling(proxy.port, keys)
        recorder.exchange = self._paris

    def run(self, seconds: float = PATIENCE) -> "Pair":
        """Exchange the messages and return once both islands are done."""
        self._attempt("berlin", lambda: self._berlin(seconds))
        if self.greeted.is_set():
            assert self._paris_done.wait(PATIENCE)
        return self

    def _berlin(self, seconds: float) -> None:
        with self._client.exchange({}, expects, seconds) as channel:
            channel.receive()
            self.greeted.set()
            assert self.go_on.wait(PATIENCE)
            channel.send({"data": True}, [MESSAGE])
            self.got["berlin"] = channel.receive().arrays
            channel.send({"received": True})

    def _paris(self, caller, hello, connect) -> None:
        try:
            self._attempt("paris", lambda: self._answer(connect))
        finally:
            self._paris_done.set()

    def _answer(self, connect) -> None:
        channel = connect(expects)
        channel.send({"accept": True})
        assert self.go_on.wait(PATIENCE)
        channel.send({"data": True}, [MESSAGE])
        self.got["paris"] = channel.receive().arrays
        channel.receive()

    def _attempt(self, name: str, do) -> None:
        try:
            do()
        except PeerError as error:
            self.errors[name] = error

    def check_whole(self) -> None:
        """Assert that each received message equals the one that was sent."""
        for arrays in self.got.values():
            assert len(arrays) == 1 and (arrays[0] == MESSAGE).all()


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(params=["tls", "plain"])
def pair(request, ca) -> Iterator[Pair]:
    with pair_over(ca if request.param == "tls" else None) as it:
        yield it


@contextlib.contextmanager
def pair_over(ca: trustme.CA | None) -> Iterator[Pair]:
    keys = {name: None if ca is None else keys_of(ca, name) for name in ("paris", "berlin")}
    recorder = Recorder()
    with running(recorder, keys["paris"]) as server, FaultProxy(server.port) as proxy:
        it = Pair(proxy, recorder, keys["berlin"])
        it.go_on.set()
        yield it
        it.go_on.set()


def test_messages_arrive_whole_over_a_slow_distant_network(pair):
    pair.proxy.latency = 0.05
    pair.proxy.rate = 20e6
    pair.run()
    assert (pair.errors, set(pair.got)) == ({}, {"berlin", "paris"})
    pair.check_whole()


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_connection_cut_within_a_message_fails_its_receiver_at_once(pair, direction):
    """Its sender may have written everything by then without noticing the cut, hence the commit."""
    pair.proxy.cut[direction] = 1 << 20
    pair.run()
    receiver = "paris" if direction == "up" else "berlin"
    assert receiver in pair.errors and not any(isinstance(error, LateError) for error in pair.errors.values())
    assert receiver not in pair.got
    pair.check_whole()


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_corrupted_byte_is_detected(pair, direction):
    pair.proxy.flip[direction] = 1_000_003
    pair.run()
    assert pair.errors
    assert pair.proxy.flip == {}
    pair.check_whole()
    assert ("paris" if direction == "up" else "berlin") not in pair.got


def test_a_connection_that_is_reset_breaks_the_call_at_once(pair):
    pair.go_on.clear()
    thread = threading.Thread(target=pair.run)
    thread.start()
    assert pair.greeted.wait(PATIENCE)
    pair.proxy.reset()
    pair.go_on.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert set(pair.errors) >= {"berlin"} and not any(isinstance(e, LateError) for e in pair.errors.values())
    assert pair.got == {}


def test_calls_over_a_silent_network_end_at_the_deadline(ca):
    """Three calls at the same time: silence in both directions, only towards paris, and only towards berlin."""
    with contextlib.ExitStack() as stack:
        pairs = [(silent, stack.enter_context(pair_over(ca))) for silent in SILENT]
        threads = [threading.Thread(target=pair.run, args=(6.0,)) for _, pair in pairs]
        for (silent, pair), thread in zip(pairs, threads, strict=True):
            pair.go_on.clear()
            thread.start()
            assert pair.greeted.wait(PATIENCE)
            pair.proxy.silent |= silent
            pair.go_on.set()
        for (silent, pair), thread in zip(pairs, threads, strict=True):
            thread.join(PATIENCE)  # far above the 6 s deadline, which a busy machine exceeds
            assert not thread.is_alive()
            assert "paris" in pair.errors
            assert ("berlin" in pair.got) == ("down" not in silent)  # its own messages may be lost without notice
            assert "down" not in silent or isinstance(pair.errors["berlin"], LateError)
            pair.check_whole()


def test_a_server_ends_its_calls_when_it_is_closed():
    """Flight cannot end them: it waits for a stopped caller until that caller's own deadline."""
    recorder = Recorder()
    ended = threading.Event()

    def exchange(caller, hello, connect):
        channel = connect(lambda header: None)
        channel.send({})
        try:
            channel.receive()
        finally:
            ended.set()

    recorder.exchange = exchange
    for host in ("127.0.0.1", "::1"):
        if host == "::1" and not socket.has_dualstack_ipv6():
            continue
        ports = free_ports(len(NAMES))
        islands = (Island(name, Address(host, port)) for name, port in zip(NAMES, ports, strict=True))
        roster = Roster("test", tuple(islands))
        server = Server(roster, "paris", None, recorder.handlers)
        with (
            pytest.raises(BrokenError, match="paris went away in the middle of the call"),
            Client(roster, "berlin", None, "paris").exchange({}, lambda header: None, PATIENCE) as channel,
        ):
            channel.receive()
            server.close(timeout=0.1)
            assert ended.wait(PATIENCE)
            channel.receive()
        ended.clear()


def test_a_call_to_a_port_that_never_answers_ends_at_the_deadline(ca):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        with pytest.raises(LateError, match="paris: the call's deadline passed"):
            calling(port, keys_of(ca, "berlin")).action("status", {}, 0.5)


def test_messages_cut_off_by_a_killed_island_are_not_accepted():
    """SIGKILL in the middle of two messages: one sent as the caller, and one sent as the called island."""
    spec = [ArraySpec((4 * PIECE_BYTES,), np.dtype(np.uint8))]
    errors = []
    done = threading.Event()
    recorder = Recorder()

    def expects(header):
        return spec if header.get("data") else None

    def exchange(caller, hello, connect):
        try:
            connect(expects).receive()
        except PeerError as error:
            errors.append(error)
        finally:
            done.set()

    recorder.exchange = exchange
    with running(recorder) as server:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
        command = [sys.executable, "-m", "support.island_to_kill", str(server.port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as victim:
            try:
                assert victim.stdout is not None
                port = int(victim.stdout.readline())
                with (
                    pytest.raises(BrokenError, match="paris went away in the middle of the call"),
                    calling(port).exchange({}, expects, PATIENCE) as channel,
                ):
                    channel.receive()
                    assert [victim.stdout.readline() for _ in range(2)] == ["begun\n", "begun\n"]
                    victim.send_signal(signal.SIGKILL)
                    channel.receive()
                assert done.wait(PATIENCE)
            finally:
                victim.kill()
    assert [type(error) for error in errors] == [BrokenError]
    assert str(errors[0]).startswith("berlin")


# --- garbage on the port

KINDS = 9  # of garbage
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def garbage(seed: int) -> bytes:
    """Return bytes of a stranger: nothing, noise, half a handshake, or a protocol's handshake with noise after it."""
    generator = np.random.default_rng(seed)
    noise = generator.bytes(int(generator.integers(1, 3000)))
    hello = b"\x16\x03\x01" + (512).to_bytes(2, "big") + b"\x01\x00\x01\xfc\x03\x03"
    settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    kinds = [b"", noise, hello, hello + noise, b"GET / HTTP/1.1\r\n\r\n", PREFACE, PREFACE + noise]
    kinds += [PREFACE + settings + noise, PREFACE + settings + b"\xff\xff\xff\x00\x01\x00\x00\x00\x01"]
    assert len(kinds) == KINDS
    return kinds[seed % KINDS]


def send_garbage(port: int, tries: int) -> None:
    held = []
    for seed in range(tries):
        one = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        with contextlib.suppress(OSError):
            one.sendall(garbage(seed))
        held.append(one)
        if len(held) > 20:  # keep some connections open for a while
            held.pop(0).close()
    for one in held:
        one.close()


def check_garbage(ca: trustme.CA | None, tries: int) -> None:
    keys = {name: None if ca is None else keys_of(ca, name) for name in ("paris", "berlin")}
    recorder = Recorder()
    with running(recorder, keys["paris"]) as server:
        client = calling(server.port, keys["berlin"])
        assert client.action("status", {}, PATIENCE)
        send_garbage(server.port, 5 * KINDS)  # warm-up: what is allocated once may stay
        before, threads, memory = settled(descriptors), settled(threading.active_count), resident()
        send_garbage(server.port, tries)
        assert client.action("status", {}, PATIENCE)
        assert in_time(lambda: settled(descriptors) <= before + 5)
        assert in_time(lambda: settled(threading.active_count) <= threads + 3)
        assert resident() - memory < 64 << 20
    assert recorder.lines == []


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux lists them")
@pytest.mark.parametrize("is_tls", [True, False])
def test_garbage_on_the_port_neither_stops_the_server_nor_leaks(ca, is_tls):
    check_garbage(ca if is_tls else None, 5 * KINDS)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux lists them")
@pytest.mark.parametrize("is_tls", [True, False])
def test_ten_thousand_pieces_of_garbage_neither_stop_the_server_nor_leak(ca, is_tls):
    check_garbage(ca if is_tls else None, 10_000)


def test_a_connection_that_is_reset_before_its_handshake_leaves_no_socket(ca, monkeypatch):
    """Python's `ssl` alone would leave it to the garbage collector, which would warn of it."""
    connect = ssl.SSLSocket.connect

    def then_reset(connection, address):
        connect(connection, address)
        accepted, _ = listening.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()  # sends a reset, because of SO_LINGER 0
        time.sleep(0.2)

    monkeypatch.setattr(ssl.SSLSocket, "connect", then_reset)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = Address("127.0.0.1", listening.getsockname()[1])
        error = probe.why_unreachable("paris", address, keys_of(ca, "berlin"))
        probe.learn_issue("paris", address, keys_of(ca, "berlin"), Newest(None))
    gc.collect()
    assert "paris" in str(error) and "does not take the call" in str(error)
