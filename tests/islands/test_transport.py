"""Calls over real sockets with mutual TLS: who is let in, what each fault is called, and what strangers cost."""

import asyncio
import contextlib
import os
import socket

import grpc
import pytest

from noloco_jax.islands import exchange
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.exchange import Broken
from noloco_jax.islands.keys import issue_in, load_keys, make_keys
from noloco_jax.islands.roster import Address
from noloco_jax.islands.transport import CALLS_OF_ONE, HANDSHAKE_SECONDS, MAX_BYTES, Dialler
from support.served import dialler, echoed, keys_in, roster_at, served


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return keys_in(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    return keys_in(tmp_path_factory.mktemp("foreign"), "other")


async def fault(one: Dialler, **fields) -> str:
    with pytest.raises(Broken) as caught:
        await one.greet("paris", pb.Greeting(**fields), 60.0)
    return str(caught.value)


def test_frames_travel_both_ways_and_the_caller_is_known_by_its_certificate(keys):
    async def main():
        async with served(keys["paris"]) as (node, port), dialler("rome", keys["berlin"], port) as one:
            assert await echoed(one, b"x" * (512 << 10)) == b"x" * (512 << 10)
            assert (await one.greet("paris", pb.Greeting(), 60.0)).round == 7
            assert node.callers == ["berlin", "berlin"]

    asyncio.run(main())


def test_without_tls_the_caller_says_its_name():
    async def main():
        async with served(None) as (node, port), dialler("berlin", None, port) as one:
            assert await echoed(one, b"x") == b"x"
            assert node.callers == ["berlin"]

    asyncio.run(main())


def test_each_fault_of_a_connection_has_a_text_of_its_own(keys, foreign):
    async def main():
        async with served(keys["paris"]) as (node, port):
            async with dialler("berlin", foreign["berlin"], port) as one:
                wrong_root = await fault(one)
            async with dialler(
                "berlin",
                keys["berlin"]._replace(certificate=foreign["berlin"].certificate, key=foreign["berlin"].key),
                port,
            ) as one:
                foreign_client = await fault(one)
            mistaken = Dialler("berlin", keys["berlin"], roster_at({"rome": port}))
            with pytest.raises(Broken) as caught:
                await mistaken.greet("rome", pb.Greeting(), 60.0)
            await mistaken.close()
            async with dialler("berlin", None, port) as one:
                no_tls = await fault(one)
            assert node.callers == []
        async with dialler("berlin", keys["berlin"], 1) as one:
            dead_port = await fault(one)
        nowhere = roster_at({})
        nowhere = nowhere.changed(nowhere.member("paris")._replace(address=Address("no-such-host.invalid", 7070)))
        one = Dialler("berlin", keys["berlin"], nowhere)
        no_host = await fault(one)
        await one.close()
        return wrong_root, foreign_client, str(caught.value), no_tls, dead_port, no_host

    wrong_root, foreign_client, wrong_name, no_tls, dead_port, no_host = asyncio.run(main())
    assert "certificate is refused" in wrong_root
    assert "refuses this" in foreign_client
    assert "another island's" in wrong_name
    assert no_tls
    assert dead_port == "nobody listens there"
    assert no_host == "no such host"


def test_a_revoked_certificate_is_refused_on_both_sides(keys, tmp_path):
    make_keys(roster_at({}), tmp_path, 30)
    old = {name: load_keys(tmp_path / name, name) for name in ("paris", "berlin")}
    make_keys(roster_at({}), tmp_path, 30, replace=["paris", "berlin"])
    new = {name: load_keys(tmp_path / name, name) for name in ("paris", "berlin")}
    roster = roster_at({})
    for name in ("paris", "berlin"):
        roster = roster.changed(roster.member(name)._replace(issued=issue_in(tmp_path / name)))

    async def main(server, client) -> str:
        async with served(server, roster=roster) as (_, port):
            one = Dialler(
                "berlin", client, roster.changed(roster.member("paris")._replace(address=Address("127.0.0.1", port)))
            )
            try:
                await one.greet("paris", pb.Greeting(), 60.0)
                return ""
            except Broken as error:
                return str(error)
            finally:
                await one.close()

    assert asyncio.run(main(new["paris"], new["berlin"])) == ""
    assert "revoked" in asyncio.run(main(new["paris"], old["berlin"]))
    assert "revoked" in asyncio.run(main(old["paris"], new["berlin"]))


def test_weights_come_in_order_and_a_refusal_has_its_reason(keys):
    async def main():
        async with served(keys["paris"]) as (_, port), dialler("berlin", keys["berlin"], port) as one:
            frames = [frame async for frame in one.weights("paris", pb.WeightsRequest())]
            assert [frame.WhichOneof("kind") for frame in frames] == ["offer", "piece"]
            with pytest.raises(Broken, match="it has not finished"):
                async for _ in one.weights("paris", pb.WeightsRequest(last=True)):
                    pass

    asyncio.run(main())


def test_a_caller_that_takes_no_more_weights_is_left_after_seconds(keys, monkeypatch):
    """As one that is stopped or cut off would be, for which a donor stays until its end otherwise."""
    monkeypatch.setattr(exchange, "SILENT_SECONDS", 1.0)

    async def main():
        async with served(keys["paris"]) as (node, port), dialler("berlin", keys["berlin"], port) as one:
            node.pieces, node.piece_bytes = 200, 1 << 20
            frames = one.weights("paris", pb.WeightsRequest())
            await anext(frames)
            async with asyncio.timeout(60):
                await node.ended.wait()
            await frames.aclose()

    asyncio.run(main())


def test_a_member_has_a_few_calls_at_once(keys):
    async def main():
        async with served(keys["paris"]) as (_, port), dialler("berlin", keys["berlin"], port) as one:
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(CALLS_OF_ONE):
                    stream = await stack.enter_async_context(one.exchange("paris"))
                    await stream.send(pb.Frame())
                    await stream.receive()
                with pytest.raises(Broken, match="too many calls"):
                    await echoed(one, b"x")
                async with dialler("rome", keys["rome"], port) as other:
                    assert await echoed(other, b"x") == b"x"
            while True:  # until pytest's time limit: the listener hears a little later that a call is over
                with contextlib.suppress(Broken):
                    assert await echoed(one, b"x") == b"x"
                    break
                await asyncio.sleep(0.05)

    asyncio.run(main())


def test_messages_that_are_too_large_or_inflate_are_refused(keys):
    async def main():
        async with served(keys["paris"]) as (node, port), dialler("berlin", keys["berlin"], port) as one:
            with pytest.raises(Broken):
                await echoed(one, b"x" * (MAX_BYTES + 1))
            credentials = grpc.ssl_channel_credentials(
                keys["berlin"].authority, keys["berlin"].key, keys["berlin"].certificate
            )
            options = [("grpc.ssl_target_name_override", "paris"), ("grpc.max_send_message_length", -1)]
            for size in (MAX_BYTES + 1, 256 << 20):
                async with grpc.aio.secure_channel(
                    f"127.0.0.1:{port}", credentials, options, compression=grpc.Compression.Gzip
                ) as channel:
                    greet = channel.unary_unary("/noloco.Island/Greet")
                    for message in (bytes(size), pb.Greeting(address="x" * 1000).SerializeToString()):
                        with pytest.raises(grpc.aio.AioRpcError):
                            await greet(message, timeout=300)
            assert node.frames == 0 and not node.greetings
            assert await echoed(one, b"x") == b"x"

    before = _resident()
    asyncio.run(main())
    assert _resident() - before < 600 << 20  # the client's own 256 MiB, twice


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_bytes_that_are_no_message_are_refused(keys):
    async def main():
        async with served(keys["paris"]) as (_, port), dialler("berlin", keys["berlin"], port) as one:
            credentials = grpc.ssl_channel_credentials(
                keys["berlin"].authority, keys["berlin"].key, keys["berlin"].certificate
            )
            async with grpc.aio.secure_channel(
                f"127.0.0.1:{port}", credentials, [("grpc.ssl_target_name_override", "paris")]
            ) as channel:
                with pytest.raises(grpc.aio.AioRpcError):
                    await channel.unary_unary("/noloco.Island/Greet")(b"\xff" * 100, timeout=300)
            assert await echoed(one, b"x") == b"x"

    asyncio.run(main())


def is_closed(stranger: socket.socket) -> bool:
    """Return whether the other end has closed the connection."""
    stranger.setblocking(False)
    try:
        return stranger.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_silent_sockets_are_closed_and_hold_nobody_up(keys):
    """300 strangers connect and say nothing: members go on, and all are gone after the handshake's time limit."""

    async def main():
        async with served(keys["paris"]) as (_, port), dialler("berlin", keys["berlin"], port) as one:
            assert await echoed(one, b"x") == b"x"
            strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
            assert await echoed(one, b"x", HANDSHAKE_SECONDS) == b"x"
            for stranger in strangers:
                while not is_closed(stranger):  # until pytest's time limit
                    await asyncio.sleep(0.1)
                stranger.close()

    asyncio.run(main())
