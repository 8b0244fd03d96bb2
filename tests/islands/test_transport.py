"""Calls over real sockets with mutual TLS: who is let in, what each fault is called, and what strangers cost."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from noloco_jax.islands import exchange, transport
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.exchange import ConnectionLost
from noloco_jax.islands.keys import issue_in, load_keys, make_keys
from noloco_jax.islands.roster import Address
from noloco_jax.islands.transport import CALLS_OF_ONE, HANDSHAKE_SECONDS, MAX_BYTES, WATCHES_OF_ONE, Dialler
from support.served import dialler, echoed, keys_in, roster_at, served
from support.slow_proxy import Link, Proxy

pytestmark = pytest.mark.real_time


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return keys_in(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    return keys_in(tmp_path_factory.mktemp("foreign"), "other")


@contextlib.asynccontextmanager
async def closed(one: Dialler) -> AsyncIterator[Dialler]:
    try:
        yield one
    finally:
        await one.close()


@contextlib.asynccontextmanager
async def raw_channel(keys, port: int, **options: Any) -> AsyncIterator[Any]:
    """Give a channel of berlin to paris that sends anything, and the path of a call."""
    made = grpc.ssl_channel_credentials(keys["berlin"].authority, keys["berlin"].key, keys["berlin"].certificate)
    fields = [("grpc.ssl_target_name_override", "paris"), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", made, fields, **options) as channel:
        yield channel.unary_unary("/noloco.Island/Greet")


async def test_frames_travel_both_ways_and_the_caller_is_known_by_its_certificate(keys):
    async with served(keys["paris"]) as (node, port), dialler("rome", keys["berlin"], port) as one:
        assert await echoed(one, b"x" * (512 << 10)) == b"x" * (512 << 10)
        assert (await one.greet("paris", pb.Greeting(), 60.0)).round == 7
        assert node.callers == ["berlin", "berlin"]


async def test_without_tls_the_caller_says_its_name():
    async with served(None) as (node, port), dialler("berlin", None, port) as one:
        assert await echoed(one, b"x") == b"x"
        assert node.callers == ["berlin"]


async def test_each_fault_of_a_connection_has_a_text_of_its_own(keys, foreign):
    mine, theirs = keys["berlin"], foreign["berlin"]
    nowhere = roster_at({})
    nowhere = nowhere.changed(nowhere.member("paris")._replace(address=Address("no-such-host.invalid", 7070)))
    async with served(keys["paris"]) as (node, port):
        for credentials, roster, name, said in (
            (theirs, roster_at({"paris": port}), "paris", "certificate is refused"),
            (theirs._replace(authority=mine.authority), roster_at({"paris": port}), "paris", "refuses this"),
            (mine, roster_at({"rome": port}), "rome", "another island's"),
            (None, roster_at({"paris": port}), "paris", "."),
            (mine, roster_at({}), "paris", "^nobody listens there$"),
            (mine, nowhere, "paris", "^no such host$"),
        ):
            async with closed(Dialler("berlin", credentials, roster)) as one:
                with pytest.raises(ConnectionLost, match=said):
                    await one.greet(name, pb.Greeting(), 60.0)
        assert node.callers == []


async def test_a_revoked_certificate_is_refused_on_both_sides(tmp_path):
    roster = roster_at({})
    make_keys(roster, tmp_path, 30)
    old = {name: load_keys(tmp_path / name, name) for name in roster.names}
    make_keys(roster, tmp_path, 30, replace=["paris", "berlin"])
    new = {name: load_keys(tmp_path / name, name) for name in roster.names}
    for name in ("paris", "berlin"):
        roster = roster.changed(roster.member(name)._replace(issued=issue_in(tmp_path / name)))
    for server, client, is_revoked in ((new, new, False), (new, old, True), (old, new, True)):
        async with served(server["paris"], roster=roster) as (_, port):
            moved = roster.changed(roster.member("paris")._replace(address=Address("127.0.0.1", port)))
            async with closed(Dialler("berlin", client["berlin"], moved)) as one:
                with pytest.raises(ConnectionLost, match="revoked") if is_revoked else contextlib.nullcontext():
                    await one.greet("paris", pb.Greeting(), 60.0)


async def test_calls_to_an_island_that_only_dials_out_fail_at_their_first_answer():
    """Not before, where a watcher's task would end with them."""
    roster = roster_at({})
    roster = roster.changed(roster.member("paris")._replace(address=Address("", 0)))
    async with closed(Dialler("berlin", None, roster)) as one:
        for answers in (one.watch("paris", 1.0), one.weights("paris", pb.WeightsRequest())):
            with pytest.raises(ConnectionLost, match="it only dials out"):
                await anext(answers)


async def test_weights_come_in_order_and_a_refusal_has_its_reason(keys):
    async with served(keys["paris"]) as (_, port), dialler("berlin", keys["berlin"], port) as one:
        frames = [frame async for frame in one.weights("paris", pb.WeightsRequest())]
        assert [frame.WhichOneof("kind") for frame in frames] == ["offer", "piece"]
        with pytest.raises(ConnectionLost, match="it has not finished"):
            async for _ in one.weights("paris", pb.WeightsRequest(last=True)):
                pass


async def test_a_caller_that_takes_no_more_weights_is_left_after_seconds(keys, monkeypatch):
    """As one that is stopped or cut off would be, for which a donor stays until its end otherwise."""
    monkeypatch.setattr(exchange, "SILENT_SECONDS", 1.0)

    async with served(keys["paris"]) as (node, port), dialler("berlin", keys["berlin"], port) as one:
        node.pieces, node.piece_bytes = 200, 1 << 20
        frames = one.weights("paris", pb.WeightsRequest())
        await anext(frames)
        async with asyncio.timeout(60):
            await node.ended.wait()
        await frames.aclose()


async def test_a_member_has_a_few_calls_at_once(keys):
    async with served(keys["paris"]) as (_, port), dialler("berlin", keys["berlin"], port) as one:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(CALLS_OF_ONE):
                stream = await stack.enter_async_context(one.exchange("paris"))
                await stream.send(pb.Frame())
                await stream.receive()
            with pytest.raises(ConnectionLost, match="too many calls"):
                await echoed(one, b"x")
            async with dialler("rome", keys["rome"], port) as other:
                assert await echoed(other, b"x") == b"x"
        while True:  # until pytest's time limit: the listener hears a little later that a call is over
            with contextlib.suppress(ConnectionLost):
                assert await echoed(one, b"x") == b"x"
                break
            await asyncio.sleep(0.05)


async def test_a_member_watches_a_few_times_at_once_and_its_other_calls_are_not_counted_with_them(keys):
    async with served(keys["paris"]) as (_, port), dialler("berlin", keys["berlin"], port) as one:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(WATCHES_OF_ONE):
                watch = await stack.enter_async_context(contextlib.aclosing(one.watch("paris", 0.2)))
                assert [(await anext(watch)).round for _ in range(2)] == [7, 7]
            with pytest.raises(ConnectionLost, match="too many dashboards watch it"):
                await anext(one.watch("paris", 0.2))
            assert await echoed(one, b"x") == b"x"
        again = await retried(lambda: anext(one.watch("paris", 0.2)))
        assert again.round == 7


async def test_who_watches_is_checked_again_once_the_roster_has_changed(keys):
    async with served(keys["paris"]) as (node, port), dialler("berlin", keys["berlin"], port) as one:
        watch = one.watch("paris", 0.2)
        assert (await anext(watch)).round == 7
        node.roster = node.roster.changed(node.roster.member("rome")._replace(until_round=3))
        async with asyncio.timeout(60):
            assert len([status async for status in watch]) <= 2
        node.roster = node.roster.changed(node.roster.member("berlin")._replace(until_round=8))
        async with asyncio.timeout(60):
            assert len([status async for status in one.watch("paris", 0.2)]) <= 1


async def test_messages_that_are_too_large_or_inflate_are_refused(keys):
    async with served(keys["paris"]) as (node, port), dialler("berlin", keys["berlin"], port) as one:
        with pytest.raises(ConnectionLost):
            await echoed(one, b"x" * (MAX_BYTES + 1))
        for size in (MAX_BYTES + 1, 256 << 20):
            async with raw_channel(keys, port, compression=grpc.Compression.Gzip) as greet:
                for message in (bytes(size), pb.Greeting(about=["x" * 1000]).SerializeToString()):
                    with pytest.raises(grpc.aio.AioRpcError):
                        await greet(message, timeout=300)
        assert node.frames == 0 and not node.greetings
        assert await echoed(one, b"x") == b"x"
    before = _resident()
    assert _resident() - before < 600 << 20  # the client's own 256 MiB, twice


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_bytes_that_are_no_message_are_refused(keys):
    async with served(keys["paris"]) as (_, port), dialler("berlin", keys["berlin"], port) as one:
        async with raw_channel(keys, port) as greet:
            with pytest.raises(grpc.aio.AioRpcError):
                await greet(b"\xff" * 100, timeout=300)
        assert await echoed(one, b"x") == b"x"


def is_closed(stranger: socket.socket) -> bool:
    """Return whether the other end has closed the connection."""
    stranger.setblocking(False)
    try:
        return stranger.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


async def test_silent_sockets_are_closed_and_hold_nobody_up(keys):
    """300 strangers connect and say nothing: members go on, and all are gone after the handshake's time limit."""

    async with served(keys["paris"]) as (_, port), dialler("berlin", keys["berlin"], port) as one:
        assert await echoed(one, b"x") == b"x"
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
        assert await echoed(one, b"x", HANDSHAKE_SECONDS) == b"x"
        for stranger in strangers:
            while not is_closed(stranger):  # until pytest's time limit
                await asyncio.sleep(0.1)
            stranger.close()


async def test_a_connection_that_a_nat_forgot_is_left_for_a_new_one(keys, monkeypatch):
    """Its packets are swallowed, and nobody resets it: only an unanswered ping shows that it is dead."""
    monkeypatch.setattr(transport, "PING_SECONDS", 1)
    monkeypatch.setattr(transport, "PONG_SECONDS", 2)
    async with served(keys["paris"]) as (_, port):
        with Proxy(port) as proxy:
            async with dialler("berlin", keys["berlin"], proxy.port) as one:
                assert await echoed(one, b"x") == b"x"
                assert (await one.greet("paris", pb.Greeting(), 60.0)).round == 7
                proxy.forget()
                with pytest.raises(TimeoutError):
                    await echoed(one, b"x", 0.5)
                async with asyncio.timeout(20):
                    assert await retried(lambda: echoed(one, b"x", 1.0)) == b"x"
                    assert (await retried(lambda: one.greet("paris", pb.Greeting(), 1.0))).round == 7


async def test_pings_of_an_idle_connection_are_welcome(keys, monkeypatch):
    """A listener of gRPC ends a connection with the third ping in five minutes, unless it is told otherwise."""
    monkeypatch.setattr(transport, "PING_SECONDS", 1)
    async with served(keys["paris"]) as (_, port):
        with Proxy(port) as proxy:
            async with dialler("berlin", keys["berlin"], proxy.port) as one:
                await one.greet("paris", pb.Greeting(), 60.0)
                await asyncio.sleep(5.5)
                await one.greet("paris", pb.Greeting(), 60.0)
        assert proxy.num_connections == 1


async def test_a_greeting_does_not_wait_behind_an_upload(keys):
    """At 1 Mbit/s, 2 MB that an exchange has buffered take 16 s."""
    link = Link(125e3)
    async with served(keys["paris"]) as (node, port):
        node.is_silent = True
        with Proxy(port, there=[link]) as proxy:
            async with dialler("berlin", keys["berlin"], proxy.port) as one, one.exchange("paris") as stream:

                async def upload() -> None:
                    for _ in range(4):
                        await stream.send(pb.Frame(piece=pb.Piece(data=bytes(512 << 10))))

                uploading = asyncio.ensure_future(upload())
                while link.num_bytes < 100e3:
                    await asyncio.sleep(0.05)
                for _ in range(3):
                    assert (await one.greet("paris", pb.Greeting(), 2.0)).round == 7
                assert node.frames < 4
                uploading.cancel()


async def retried(call: Any) -> Any:
    while True:
        with contextlib.suppress(ConnectionLost, TimeoutError):
            return await call()
        await asyncio.sleep(0.1)


async def test_all_connections_but_that_of_weights_have_pings(monkeypatch):
    """Their answers would wait behind megabytes of weights in buffers."""
    made: list[dict[str, Any]] = []
    open_channel = grpc.aio.insecure_channel

    def opened(target: str, options: Any) -> Any:
        made.append(dict(options))
        return open_channel(target, options)

    monkeypatch.setattr(grpc.aio, "insecure_channel", opened)
    async with closed(Dialler("berlin", None, roster_at({}))) as one:
        for use in ("exchanges", "greetings", "weights"):
            one._channel("paris", use)
            one._channel("paris", use)  # the same one
    pings = [options["grpc.keepalive_time_ms"] for options in made]
    assert pings == [5000, 5000, 2**31 - 1]
    assert [options["grpc.http2.ping_timeout_ms"] for options in made] == [22000, 22000, 2**31 - 1]
