"""Calls between two islands over real Flight and TLS on loopback."""

import datetime
import threading
import time

import numpy as np
import pytest
import trustme

from noloco_jax.errors import UserError
from noloco_jax.islands import server as server_module
from noloco_jax.islands.frames import ArraySpec
from noloco_jax.islands.payload import specs_of
from noloco_jax.islands.peer_errors import (
    BrokenError,
    BusyError,
    EndedError,
    LateError,
    PeerError,
    RefusedError,
    UnreachableError,
)
from noloco_jax.islands.roster import Address
from noloco_jax.islands.server import Server
from support.islands import Recorder, arrays, calling, keys_of, nothing, roster_at, running
from support.ports import free_ports

SECONDS = 60.0  # timeout of calls that end long before it


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


def specs(header):
    return specs_of(arrays()) if header.get("data") else None


def both_send(recorder: Recorder, port: int, keys=None, own=arrays, expects=specs) -> list[np.ndarray]:
    """Return what berlin receives when both send arrays at once; paris appends what it receives to `recorder.got`."""

    def exchange(caller, hello, connect):
        channel = connect(expects)
        channel.send({"accept": hello})
        channel.send({"data": caller}, own(1))
        recorder.got.append(channel.receive())
        channel.send({"commit": True})

    recorder.exchange = exchange
    with calling(port, keys).exchange({"round": 3}, expects, SECONDS) as channel:
        assert channel.receive().header == {"accept": {"round": 3}}
        channel.send({"data": True}, own(2))
        header, got = channel.receive()
        assert got is not None
        assert header == {"data": "berlin"}
        assert channel.receive().header == {"commit": True}
        with pytest.raises(EndedError, match="paris ended the call"):
            channel.receive()
    return got


def same(left, right) -> bool:
    return all(a.dtype == b.dtype and a.shape == b.shape and (a == b).all() for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("is_tls", [True, False])
def test_both_sides_send_arrays_at_once(ca, is_tls):
    recorder = Recorder()
    with running(recorder, keys_of(ca, "paris") if is_tls else None) as server:
        got = both_send(recorder, server.port, keys_of(ca, "berlin") if is_tls else None)
    assert same(got, arrays(1)) and same(recorder.got[0].arrays or [], arrays(2))
    assert recorder.got[0].header == {"data": True}
    assert not any(array.flags.writeable for array in got)
    assert recorder.lines == []


def test_messages_larger_than_all_buffers_cross_without_a_deadlock():
    """Without a reader thread, 64 MB each way would block until the deadline."""
    recorder = Recorder()

    def large(seed: int) -> list[np.ndarray]:
        return [np.full(16 << 20, seed, np.float32)]

    with running(recorder) as server:
        got = both_send(recorder, server.port, own=large, expects=lambda h: specs_of(large(0)) if "data" in h else None)
    assert same(got, large(1)) and same(recorder.got[0].arrays or [], large(2))


def test_state_comes_array_by_array_under_its_names(ca):
    state = {"slow": np.arange(6.0).reshape(2, 3), "momentum": np.ones(4, np.float32), "step": np.asarray(7)}
    recorder = Recorder()
    recorder.state = lambda caller, request: ((name, state[name]) for name in request["names"])
    expected = {name: specs_of(array)[0] for name, array in state.items()}
    with running(recorder, keys_of(ca, "paris")) as server:
        client = calling(server.port, keys_of(ca, "berlin"))
        got = dict(client.state({"names": list(state)}, expected, SECONDS))
        assert got.keys() == state.keys() and same(got.values(), state.values())
        for names, said in (
            (["slow"], "paris ended the call, and more was expected"),
            (["slow", "slow"], "paris sends 'slow' twice"),
            (["step", "slow"], None),
        ):
            if said is None:
                other = expected | {"slow": ArraySpec((3, 2), np.dtype(float))}
                said = (
                    r'paris: it announces arrays of \[\["float64", \[2, 3\]\]\], and arrays of .*\[3, 2\].* would fit'
                )
            else:
                other = expected
            with pytest.raises((EndedError, RefusedError), match=said):
                list(client.state({"names": names}, other, SECONDS))
        with pytest.raises(RefusedError, match="it sends 'momentum', which is not expected"):
            list(client.state({"names": ["momentum"]}, {"slow": expected["slow"]}, SECONDS))


def test_an_action_is_answered(ca):
    with running(Recorder(), keys_of(ca, "paris")) as server:
        client = calling(server.port, keys_of(ca, "berlin"))
        assert client.action("status", {"xid": "ü"}, SECONDS) == {"caller": "berlin", "xid": "ü"}
        with pytest.raises(RefusedError, match="paris says: there is no action 'state' here"):
            client.action("state", {}, SECONDS)


def test_a_handlers_refusal_reaches_the_caller_before_and_during_the_call():
    recorder = Recorder()
    with running(recorder) as server:
        client = calling(server.port)

        def at_once(caller, hello, connect):
            raise BusyError("two islands heal here")

        def later(caller, hello, connect):
            connect(nothing).send({})
            raise RefusedError("your model is another one")

        for handler, kind, said in (
            (at_once, BusyError, "two islands heal"),
            (later, RefusedError, "your model is another"),
        ):
            recorder.exchange = handler
            with (
                pytest.raises(kind, match=f"paris says: {said}"),
                client.exchange({}, nothing, SECONDS) as channel,
            ):
                while True:
                    channel.receive()
        assert [line.split(": ", 1)[1] for line in recorder.lines] == [
            "two islands heal here",
            "your model is another one",
        ]
        assert recorder.lines[0].startswith("the call of berlin from ipv4:127.0.0.1:")


def test_a_handlers_own_failure_is_reported_and_the_server_keeps_answering():
    recorder = Recorder()

    def fails(caller, hello, connect):
        connect(nothing)
        raise ZeroDivisionError("a\nsecret")

    recorder.exchange = fails
    with running(recorder) as server:
        client = calling(server.port)
        with (
            pytest.raises(BrokenError, match="paris says: it failed: see its log"),
            client.exchange({}, nothing, SECONDS) as channel,
        ):
            channel.receive()
        assert "failed: ZeroDivisionError('a\\nsecret')" in recorder.lines[0]
        assert client.action("status", {}, SECONDS)


def test_arrays_of_unexpected_shapes_are_refused_and_named_on_both_sides():
    recorder = Recorder()
    recorder.exchange = lambda caller, hello, connect: connect(
        lambda header: [ArraySpec((2,), np.dtype(int))]
    ).receive()
    with running(recorder) as server:
        with (
            pytest.raises(RefusedError, match=r"paris says: berlin: it announces .*\[30, 40\].* would fit here"),
            calling(server.port).exchange({}, nothing, SECONDS) as channel,
        ):
            channel.send({}, [np.zeros((30, 40))])
            channel.receive()
        assert "[30, 40]" in recorder.lines[0] and "berlin" in recorder.lines[0]


def test_a_call_ends_at_its_deadline():
    recorder = Recorder()
    wake = threading.Event()

    def exchange(caller, hello, connect):
        connect(nothing)
        wake.wait(SECONDS)

    recorder.exchange = exchange
    with running(recorder) as server:
        client = calling(server.port)
        start = time.monotonic()
        with pytest.raises(LateError), client.exchange({}, nothing, 1.0) as channel:
            channel.receive()
        assert time.monotonic() - start < SECONDS / 2
        wake.set()
        assert client.action("status", {}, SECONDS)  # the server still works


def test_calls_beyond_a_peers_limit_are_refused_as_busy(monkeypatch):
    monkeypatch.setattr(server_module, "MAX_CALLS_OF_A_PEER", 2)
    recorder = Recorder()
    proceed = threading.Event()

    def exchange(caller, hello, connect):
        connect(nothing).send({"here": True})
        proceed.wait(SECONDS)

    recorder.exchange = exchange
    with running(recorder) as server:
        berlin, rome = calling(server.port), calling(server.port, name="rome")
        with berlin.exchange({}, nothing, SECONDS) as one, berlin.exchange({}, nothing, SECONDS) as two:
            one.receive()
            two.receive()
            with pytest.raises(BusyError, match="paris says: paris has 2 calls of berlin"):
                berlin.action("status", {}, SECONDS)
            assert rome.action("status", {}, SECONDS)
            proceed.set()
        assert berlin.action("status", {}, SECONDS)


def test_a_client_reconnects_each_time_its_server_comes_back(ca):
    [port] = free_ports(1)
    keys = {name: keys_of(ca, name) for name in ("paris", "berlin")}
    client = calling(port, keys["berlin"])
    for _ in range(2):
        with pytest.raises(UnreachableError, match=f"paris at 127.0.0.1:{port}: nobody listens there"):
            client.action("status", {}, SECONDS)
        server = Server(roster_at([port]), "paris", keys["paris"], Recorder().handlers)
        assert client.action("status", {}, SECONDS)
        server.close()


# --- authentication


def refusals(client) -> set[str]:
    """Collect the errors that a client gets, by an action and by an exchange."""
    said = set()
    with pytest.raises(PeerError) as error:
        client.action("status", {}, SECONDS)
    said.add(f"{type(error.value).__name__}: {error.value}")
    with pytest.raises(PeerError) as error, client.exchange({}, nothing, SECONDS) as channel:
        channel.receive()
    said.add(f"{type(error.value).__name__}: {error.value}")
    assert not any("\n" in line for line in said)
    return said


def test_each_kind_of_wrong_key_is_reported_to_its_owner_and_to_its_callers(ca):
    """A TLS server closes without a reason: callers check their own certificate, and the peer's when they dial."""
    foreign = trustme.CA()
    past = {"not_before": datetime.datetime(2020, 1, 1), "not_after": datetime.datetime(2021, 1, 1)}
    foreign_keys = keys_of(foreign, "berlin")
    wrong_keys = {
        "expired on 2021-01-01": keys_of(ca, "berlin", **past),
        "is not of this run's authority but of 'OU=Testing CA": foreign_keys._replace(authority=ca.cert_pem.bytes()),
    }
    recorder = Recorder()
    with running(recorder, keys_of(ca, "paris")) as server:
        where = f"paris at 127.0.0.1:{server.port}"
        for fault, keys in wrong_keys.items():
            [line] = refusals(calling(server.port, keys))
            assert line.startswith(f"RefusedError: {where} closes on this island's certificate, which {fault}")
            with running(Recorder(), keys) as wrong:
                [line] = refusals(calling(wrong.port, keys_of(ca, "berlin")))
                assert line.startswith(f"RefusedError: paris at 127.0.0.1:{wrong.port}: its certificate {fault}")
        [line] = refusals(calling(server.port, foreign_keys))  # all keys are of another authority: another run
        assert line.startswith(f"RefusedError: {where}: its certificate is not of this run's authority")
        [line] = refusals(calling(server.port, None))
        assert line == f"RefusedError: {where} asks for keys: give --keys here, or start it without"
        assert calling(server.port, keys_of(ca, "berlin")).action("status", {}, SECONDS)
    with running(recorder) as plain:
        [line] = refusals(calling(plain.port, keys_of(ca, "berlin")))
        assert line.startswith(f"RefusedError: paris at 127.0.0.1:{plain.port} does not speak TLS as islands do")
    assert recorder.lines == []


def test_a_certificate_with_the_wrong_name_is_refused_and_reported_on_both_sides(ca):
    recorder = Recorder()
    with running(recorder, keys_of(ca, "paris")) as server:
        for keys, said in (
            (keys_of(ca, "london"), "a certificate made out to 'london', who is not in the roster of test"),
            (keys_of(ca, "rome"), "the caller says it is 'berlin', and its certificate is made out to 'rome'"),
            (keys_of(ca, "paris"), "the caller says it is 'berlin', and its certificate is made out to 'paris'"),
        ):
            recorder.lines.clear()
            assert refusals(calling(server.port, keys)) == {f"RefusedError: paris says: {said}"}
            assert [line.split(": ", 1)[1] for line in recorder.lines] == [said, said]
    with running(Recorder(), keys_of(ca, "rome")) as server:
        [line] = refusals(calling(server.port, keys_of(ca, "berlin")))
        assert (
            line == f"RefusedError: paris at 127.0.0.1:{server.port}: its certificate is made out to rome, not to paris"
        )


def test_names_are_checked_without_keys_as_well():
    recorder = Recorder()
    with running(recorder, name="rome") as server:
        [line] = refusals(calling(server.port))
        assert line == "RefusedError: paris says: this is rome, not 'paris': the rosters' addresses differ"
    with running(recorder) as server:
        with pytest.raises(UserError, match="no island 'london'"):
            calling(server.port, name="london")
        [line] = refusals(calling(server.port, name="paris"))
        assert (
            line
            == "RefusedError: paris says: the caller says it is paris, and so does this island: one name is used twice"
        )


def test_an_unusable_listen_address_is_reported_at_once(ca):
    with running(Recorder()) as server:
        taken = Address("127.0.0.1", server.port)
        with pytest.raises(UserError, match=f"paris cannot listen at {taken} .*in use.*: another program"):
            Server(roster_at([]), "paris", None, Recorder().handlers, listen=taken)
    with pytest.raises(UserError, match=r"paris would listen at 0.0.0.0:0 without keys: give --keys"):
        Server(roster_at([]), "paris", None, Recorder().handlers, listen=Address("0.0.0.0", 0))
    with pytest.raises(UserError, match=r"paris cannot listen at 192.0.2.1:7070 .*: give an address of this machine"):
        Server(roster_at([]), "paris", keys_of(ca, "paris"), Recorder().handlers, listen=Address("192.0.2.1", 7070))
