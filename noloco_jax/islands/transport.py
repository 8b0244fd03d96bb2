"""Calls between islands by gRPC over mutual TLS: `Dialler` calls, `Listener` answers. Both live on one asyncio loop.

Whose call it is follows from the certificate; without TLS, which is for loopback addresses alone, from the metadata.
Limits: 2 MiB a message, no compression, 16 KiB of metadata, 5 s for a handshake, 8 calls at once of one member, 128 in
all, of them 4 and 32 that watch, and half of the process's open files for connections.
"""

import asyncio
import contextlib
import os
import resource
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from noloco_jax.errors import UserError
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.certificates import owner_and_issue
from noloco_jax.islands.exchange import ConnectionLost, ProtocolError, send
from noloco_jax.islands.keys import Credentials
from noloco_jax.islands.roster import Address, Roster

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what it logs of strangers' handshakes is nobody's business

MAX_BYTES = 2 << 20  # of a message on the wire: a piece, or a greeting with a roster
CALLS_OF_ONE, CALLS_OF_ALL = 8, 128
WATCHES_OF_ONE, WATCHES_OF_ALL = 4, 32  # calls of a member that watches, beside its others, and of all members
CALL_SECONDS = 4 * 3600.0  # of any call: silence ends it much earlier
HANDSHAKE_SECONDS = 5
PING_SECONDS, PONG_SECONDS = 5, 22  # of silence before a ping, and for its answer, which waits behind an upload
_NEVER = 2**31 - 1
_SERVICE = "noloco.Island"
_METHODS = {  # name -> kind of call, messages of the caller and of the listener
    "Exchange": ("stream_stream", pb.Frame, pb.Frame),
    "Greet": ("unary_unary", pb.Greeting, pb.Status),
    "Watch": ("unary_stream", pb.WatchRequest, pb.Status),
    "Weights": ("unary_stream", pb.WeightsRequest, pb.WeightsFrame),
}
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
_NAME = "noloco-name"  # of a caller without TLS
_COMMON = [
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.max_send_message_length", MAX_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.per_message_decompression", 0),  # inflated, a small message would be a large one
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


class Dialler:
    """Calls to the islands of a roster. They raise `ConnectionLost`, with the reason in words.

    A peer has three connections, as a small call waits for all that an upload on its connection has buffered: greetings
    have one of their own. Pings find out that a connection is dead, where a NAT has forgotten it. Weights have one
    without pings, whose answers would wait for megabytes in buffers: their receiver ends a call that is silent.
    """

    def __init__(self, name: str, credentials: Credentials | None, roster: Roster):
        self._name, self._credentials, self._roster = name, credentials, roster
        self._channels: dict[tuple[str, str], tuple[tuple[str, str], grpc.aio.Channel]] = {}

    def follow(self, roster: Roster) -> None:
        self._roster = roster

    @contextlib.asynccontextmanager
    async def exchange(self, peer: str) -> AsyncIterator["_Outgoing"]:
        call = self._method(peer, "exchanges", "Exchange")(timeout=CALL_SECONDS, metadata=self._metadata)
        try:
            yield _Outgoing(call)
        finally:
            call.cancel()

    async def greet(self, peer: str, greeting: pb.Greeting, seconds: float) -> pb.Status:
        method = self._method(peer, "greetings", "Greet")
        try:
            return await method(greeting, timeout=seconds + greeting.hold_seconds, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise ConnectionLost(_words(error, seconds)) from None

    def watch(self, peer: str, every: float) -> AsyncGenerator[pb.Status, None]:
        """Yield a peer's status at once, every so many seconds, and when its phase changes."""
        return self._answers(peer, "greetings", "Watch", pb.WatchRequest(every_seconds=every), every)

    def weights(self, peer: str, request: pb.WeightsRequest) -> AsyncGenerator[pb.WeightsFrame, None]:
        return self._answers(peer, "weights", "Weights", request, CALL_SECONDS, CALL_SECONDS)

    async def _answers(
        self, peer: str, use: str, name: str, request: Any, seconds: float, timeout: float | None = None
    ) -> AsyncGenerator[Any, None]:
        """Call a peer at the first step, and yield its answers; `seconds` are those of an error's words."""
        call = self._method(peer, use, name)(request, timeout=timeout, metadata=self._metadata)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise ConnectionLost(_words(error, seconds)) from None
        finally:
            call.cancel()

    async def forget(self, peer: str) -> None:
        """Close the connections to a peer, as gRPC would try again every few seconds. A later call makes new ones."""
        for use in ("exchanges", "greetings", "weights"):
            if known := self._channels.pop((peer, use), None):
                await known[1].close(0)

    async def close(self) -> None:
        for _, channel in self._channels.values():
            await channel.close(0)
        self._channels.clear()

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self._credentials is not None else ((_NAME, self._name),)

    def _method(self, peer: str, use: str, name: str) -> Any:
        """Return a peer's method, to call on the channel for a use."""
        kind, request, answer = _METHODS[name]
        method = getattr(self._channel(peer, use), kind)
        return method(
            f"/{_SERVICE}/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=answer.FromString,
        )

    def _channel(self, peer: str, use: str) -> grpc.aio.Channel:
        """Return the channel to a peer for a use.

        It is a new one after the peer's address or certificate has changed.
        """
        member = self._roster.get(peer)
        if member is None:
            raise ConnectionLost(f"{peer} is no member")
        if not member.address.can_be_dialled:
            raise ConnectionLost("it only dials out")
        certificate = f"{peer}.{member.issued}" if member.issued else peer
        key = str(member.address), certificate
        known = self._channels.get((peer, use))
        if known is None or known[0] != key:
            self._channels[peer, use] = known = key, self._new_channel(*key, has_pings=use != "weights")
        return known[1]

    def _new_channel(self, target: str, certificate: str, *, has_pings: bool) -> grpc.aio.Channel:
        ping, pong = (1000 * PING_SECONDS, 1000 * PONG_SECONDS) if has_pings else (_NEVER, _NEVER)
        options: list[tuple[str, Any]] = [
            *_COMMON,
            ("grpc.use_local_subchannel_pool", 1),  # channels of one target share a connection otherwise
            ("grpc.keepalive_time_ms", ping),
            ("grpc.http2.ping_timeout_ms", pong),  # grpc.keepalive_timeout_ms ends nothing in 1.85
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.min_reconnect_backoff_ms", 5000),  # to connect in
            ("grpc.max_reconnect_backoff_ms", 3000),
        ]
        if self._credentials is None:
            return grpc.aio.insecure_channel(target, options)
        keys = self._credentials
        options.append(("grpc.ssl_target_name_override", certificate))
        return grpc.aio.secure_channel(
            target, grpc.ssl_channel_credentials(keys.authority, keys.key, keys.certificate), options
        )


class _Outgoing:
    """`exchange.Stream` of a call that this island has made."""

    def __init__(self, call: Any):
        self._call = call

    async def send(self, frame: pb.Frame) -> None:
        try:
            await self._call.write(frame)
        except grpc.aio.AioRpcError as error:
            raise ConnectionLost(_words(error, CALL_SECONDS)) from None
        except asyncio.InvalidStateError:  # it has ended
            raise ConnectionLost(await self._end()) from None

    async def receive(self) -> pb.Frame:
        try:
            frame = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise ConnectionLost(_words(error, CALL_SECONDS)) from None
        if frame is _EOF:
            raise ConnectionLost(await self._end())
        return frame

    async def _end(self) -> str:
        """Return the reason for which the call has ended."""
        code = await self._call.code()
        if code == grpc.StatusCode.OK:
            return "it ended the call early"
        return _words_of(code, await self._call.details() or "", CALL_SECONDS)


class Listener:
    """Server of one island; `node` answers the calls of members of its table's roster, `give` those for weights."""

    def __init__(
        self,
        node: Any,
        give: Callable[[pb.WeightsRequest], AsyncGenerator[pb.WeightsFrame, None]],
        credentials: Credentials | None,
    ):
        self._node, self._give, self._credentials = node, give, credentials
        self._calls, self._watches = Counter[str](), Counter[str]()
        self._server: grpc.aio.Server | None = None

    async def open(self, address: Address) -> int:
        """Listen at an address, and return the port; raise `UserError` where it cannot be had."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        options = [
            *_COMMON,
            ("grpc.so_reuseport", 0),
            ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_SECONDS),
            ("grpc.max_concurrent_streams", 2 * CALLS_OF_ONE),
            ("grpc.max_allowed_incoming_connections", max(files // 2, 32)),
            ("grpc.http2.min_ping_interval_without_data_ms", 500 * PING_SECONDS),
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=CALLS_OF_ALL)
        answers = {"Exchange": self._exchange, "Greet": self._greet, "Watch": self._watch, "Weights": self._weights}
        handlers = {}
        for name, (kind, request, answer) in _METHODS.items():
            make = getattr(grpc, f"{kind}_rpc_method_handler")
            handlers[name] = make(answers[name], request.FromString, answer.SerializeToString)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        try:
            if (keys := self._credentials) is None:
                port = self._server.add_insecure_port(str(address))
            else:
                pair = [(keys.key, keys.certificate)]
                server = grpc.ssl_server_credentials(pair, keys.authority, require_client_auth=True)
                port = self._server.add_secure_port(str(address), server)
        except RuntimeError:
            port = 0
        if not port:
            raise UserError(
                f"cannot listen at {address}: the port is in use, or the address is not this machine's; end what uses "
                "it, or give --listen=HOST:PORT"
            )
        await self._server.start()
        return port

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(0.2)

    async def _exchange(self, requests: Any, context: Any) -> None:
        async with self._call(context) as name:
            with contextlib.suppress(ConnectionLost):
                await self._node.meetings.called(name, _Incoming(context))

    async def _greet(self, greeting: pb.Greeting, context: Any) -> pb.Status:
        async with self._call(context, greets=True) as name:
            try:
                return await self._node.greeted(name, greeting)
            except ProtocolError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise AssertionError

    async def _watch(self, request: pb.WatchRequest, context: Any) -> None:
        async with self._call(context) as name:
            pass  # it counts among those that watch, as it lasts
        await self._refuse_former(context, name)
        if self._watches[name] >= WATCHES_OF_ONE or self._watches.total() >= WATCHES_OF_ALL:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many dashboards watch it")
        self._watches[name] += 1
        stream, roster = _Incoming(context), self._node.table.roster
        try:
            with contextlib.suppress(ConnectionLost):
                async with contextlib.aclosing(self._node.watched(request)) as statuses:
                    async for status in statuses:
                        await stream.send(status)
                        if self._node.table.roster is not roster or roster.is_over(name, status.round + 1):
                            return  # the caller calls again, and is checked again
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._watches[name] -= 1

    async def _weights(self, request: pb.WeightsRequest, context: Any) -> None:
        stream = _Incoming(context)
        async with self._call(context) as name:
            await self._refuse_former(context, name)
            try:
                async with contextlib.aclosing(self._give(request)) as frames:
                    async for frame in frames:
                        await send(stream, frame)
            except ConnectionLost as error:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def _refuse_former(self, context: Any, name: str) -> None:
        """End the call of a caller that is a member no more."""
        if ended := self._node.table.end_of(name):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, ended)

    @contextlib.asynccontextmanager
    async def _call(self, context: Any, greets: bool = False) -> AsyncIterator[str]:
        """Count a call of the caller whose name this gives; end it where the caller may not make it."""
        name, issued = self._caller(context)
        member = self._node.table.roster.get(name)
        # The greeting of a new member may bring the roster that it is in.
        if member is None and not greets:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{name or 'the caller'} is no member here")
        if member is not None and member.issued and issued != member.issued:
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, f"{name}'s certificate is revoked: copy the one made since over it"
            )
        if self._calls[name] >= CALLS_OF_ONE:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls at once")
        self._calls[name] += 1
        try:
            yield name
        finally:
            self._calls[name] -= 1
            if not self._calls[name]:
                del self._calls[name]

    def _caller(self, context: Any) -> tuple[str, int]:
        """Return the name of a caller, and when its certificate was made."""
        if self._credentials is None:
            name = dict(context.invocation_metadata() or ()).get(_NAME, "")
            return (name if isinstance(name, str) else ""), 0
        names = context.auth_context().get("x509_subject_alternative_name", ())
        owners = [owner_and_issue(name.decode("ascii", "replace")) for name in names]
        return max(owners, key=lambda owner: owner[1], default=("", 0))


class _Incoming:
    """`exchange.Stream` of a call that this island answers."""

    def __init__(self, context: Any):
        self._context = context

    async def send(self, frame: pb.Frame) -> None:
        try:
            await self._context.write(frame)
        except (grpc.aio.BaseError, grpc.RpcError, asyncio.InvalidStateError):
            raise ConnectionLost("the caller ended the call") from None

    async def receive(self) -> pb.Frame:
        try:
            frame = await self._context.read()
        except (grpc.aio.BaseError, grpc.RpcError, asyncio.InvalidStateError):
            raise ConnectionLost("the caller ended the call") from None
        if frame is _EOF:
            raise ConnectionLost("the caller ended the call")
        return frame


def _words(error: grpc.aio.AioRpcError, seconds: float) -> str:
    return _words_of(error.code(), error.details() or "", seconds)


_KNOWN = (  # parts of gRPC's texts -> words for people; the first that is found counts
    (("Connection refused",), "nobody listens there"),
    (("resolving", "DNS", "resolution"), "no such host"),
    (("Hostname Verification Check failed",), "its certificate is another island's, or revoked"),
    (("CERTIFICATE_VERIFY_FAILED",), "its certificate is refused: other keys, or expired"),
    (("TSI_PROTOCOL_FAILURE", "SSL"), "its certificate is refused, or it refuses this one: other keys, or expired"),
    (("andshake",), "the handshake failed: is TLS on one side alone, or has a certificate expired?"),
    (("timed out", "Deadline", "FD Shutdown"), "does not answer"),
    (("unreachable",), "cannot be reached"),
    (
        ("Socket closed", "recvmsg", "Connection reset", "Broken pipe"),
        "it closed the connection: it stopped, or refuses this certificate",
    ),
)


def _words_of(code: grpc.StatusCode, details: str, seconds: float) -> str:
    """Return a status of gRPC in words."""
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer in {seconds:g} s"
    if code != grpc.StatusCode.UNAVAILABLE:
        return details or code.name.lower().replace("_", " ")
    return next((words for texts, words in _KNOWN if any(text in details for text in texts)), details[:200])
