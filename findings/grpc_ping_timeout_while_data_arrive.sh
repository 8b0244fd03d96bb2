#!/usr/bin/env bash
# gRPC Python 1.85: a client that has keepalive pings gives up a connection over which data arrive all the time. The
# answer to a ping waits behind the data in the server's buffers, and bytes that arrive do not count as a sign of life:
# a download at 150 kB/s ends with "ping timeout" though no second of it is silent.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet grpcio==1.85.3
cat >"$folder/try.py" <<'PY'
import asyncio, os, time
import grpc, grpc.aio

RATE = 150_000  # bytes/s
PONG_SECONDS = 5


async def serve(reader, writer, port):
    far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)

    async def pump(source, sink, is_limited):
        while data := await source.read(4096):
            sink.write(data)
            await sink.drain()
            if is_limited:
                await asyncio.sleep(len(data) / RATE)
        sink.close()

    await asyncio.gather(pump(reader, far_writer, False), pump(far_reader, writer, True), return_exceptions=True)


async def give(request, context):
    for _ in range(400):
        yield bytes(65536)


async def download(target, options):
    """Return the longest silence in seconds, and how the download of 20 s ended."""
    longest, last, started = 0.0, time.monotonic(), time.monotonic()
    async with grpc.aio.insecure_channel(target, options) as channel:
        try:
            async for _ in channel.unary_stream("/a.A/Give")(b"", timeout=60):
                now = time.monotonic()
                longest, last = max(longest, now - last), now
                if now - started > 20:
                    return longest, "still arriving after 20 s"
        except grpc.aio.AioRpcError as error:
            return longest, error.details()
    return longest, "complete"


async def main():
    print("grpcio", grpc.__version__)
    server = grpc.aio.server()
    handlers = {"Give": grpc.unary_stream_rpc_method_handler(give)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.A", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    proxy = await asyncio.start_server(lambda r, w: serve(r, w, port), "127.0.0.1", 0, limit=4096)
    target = f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    pings = [("grpc.keepalive_time_ms", 5000), ("grpc.http2.ping_timeout_ms", 1000 * PONG_SECONDS)]
    found = {}
    for name, options in (("without pings", []), ("with pings", pings)):
        longest, end = found[name] = await download(target, options)
        print(f"{name}: {end}; the longest silence was {longest:.1f} s", flush=True)
    is_unchanged = (
        "still" in found["without pings"][1]
        and "ping timeout" in found["with pings"][1]
        and found["with pings"][0] < PONG_SECONDS
    )
    print("as described" if is_unchanged else "the behaviour has changed", flush=True)
    os._exit(not is_unchanged)


asyncio.run(main())
PY
"$folder/venv/bin/python" "$folder/try.py"
