#!/usr/bin/env bash
# gRPC Python 1.85: on a slow link a small call waits for all that an upload on its connection has written, for seconds
# at 1 Mbit/s. A second channel object changes nothing, as channels of equal target and options share one connection;
# grpc.use_local_subchannel_pool gives it one of its own, and the call takes a fraction of a second.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet grpcio==1.85.3
cat >"$folder/try.py" <<'PY'
import asyncio, os, time
import grpc, grpc.aio

RATE = 125_000  # bytes/s
free = 0.0


async def serve(reader, writer, port):
    far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)

    async def pump(source, sink, is_limited):
        global free
        while data := await source.read(4096):
            if is_limited:  # one link for all connections, in the order of their coming
                free = max(free, time.monotonic()) + len(data) / RATE
                await asyncio.sleep(free - time.monotonic())
            sink.write(data)
            await sink.drain()
        sink.close()

    await asyncio.gather(pump(reader, far_writer, True), pump(far_reader, writer, False), return_exceptions=True)


async def take(requests, context):
    async for _ in requests:
        pass
    return b"done"


async def echo_back(request, context):
    return request


def end(is_unchanged):
    print("as described" if is_unchanged else "the behaviour has changed", flush=True)
    os._exit(not is_unchanged)


async def main():
    print("grpcio", grpc.__version__)
    server = grpc.aio.server()
    handlers = {
        "Echo": grpc.unary_unary_rpc_method_handler(echo_back),
        "Take": grpc.stream_unary_rpc_method_handler(take),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.A", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    proxy = await asyncio.start_server(lambda r, w: serve(r, w, port), "127.0.0.1", 0, limit=16384)
    target = f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    busy, equal = grpc.aio.insecure_channel(target), grpc.aio.insecure_channel(target)
    own = grpc.aio.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)])
    channels = {"the same channel": busy, "another, equal one": equal, "one with a local subchannel pool": own}
    for channel in channels.values():
        await channel.unary_unary("/a.A/Echo")(b"x")

    async def pieces():
        while True:
            yield bytes(512 << 10)

    upload = asyncio.ensure_future(busy.stream_unary("/a.A/Take")(pieces()))
    await asyncio.sleep(3)
    seconds = {}
    for name, channel in channels.items():
        began = time.monotonic()
        await channel.unary_unary("/a.A/Echo")(b"x", timeout=60)
        seconds[name] = time.monotonic() - began
        print(f"a call beside an upload at 1 Mbit/s, {name}: {seconds[name]:.2f} s", flush=True)
    upload.cancel()
    same, another, local = seconds.values()
    end(same > 4 * local and another > 4 * local)


asyncio.run(main())
PY
"$folder/venv/bin/python" "$folder/try.py"
