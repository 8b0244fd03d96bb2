#!/usr/bin/env bash
# gRPC Python 1.85: a connection whose packets are swallowed (a NAT has forgotten it) outlives grpc.keepalive_timeout_ms:
# the keepalive ping is sent, and its missing answer ends nothing for the minute that grpc.http2.ping_timeout_ms has by
# default. Setting that one instead brings calls back on a new connection within seconds.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet grpcio==1.85.3
cat >"$folder/try.py" <<'PY'
import asyncio, os, time
import grpc, grpc.aio

KEEPALIVE = [("grpc.keepalive_time_ms", 1000), ("grpc.keepalive_permit_without_calls", 1)]
forgotten = 0  # connections up to this number are swallowed
count = 0


async def serve(reader, writer, port):
    global count
    count += 1
    number = count
    far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)

    async def pump(source, sink):
        while data := await source.read(65536):
            if number > forgotten:
                sink.write(data)
        sink.close()

    await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer), return_exceptions=True)


async def seconds_until_back(options):
    """Return the seconds until a call succeeds after the connection was forgotten; 20: none did."""
    global forgotten
    global server  # one that is collected early complains
    server = grpc.aio.server(options=[("grpc.http2.min_ping_interval_without_data_ms", 500), *KEEPALIVE[1:]])
    echo = grpc.unary_unary_rpc_method_handler(echo_back)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.A", {"Echo": echo}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    proxy = await asyncio.start_server(lambda r, w: serve(r, w, port), "127.0.0.1", 0)
    options = [*KEEPALIVE, *options, ("grpc.use_local_subchannel_pool", 1)]
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}", options)
    call = channel.unary_unary("/a.A/Echo")
    assert await call(b"x", timeout=5) == b"x"
    forgotten = count
    began = time.monotonic()
    while (passed := time.monotonic() - began) < 20:
        try:
            await call(b"x", timeout=1)
            break
        except grpc.aio.AioRpcError:
            pass
    await channel.close()
    await server.stop(0)
    proxy.close()
    return min(passed, 20.0)


async def echo_back(request, context):
    return request


def end(is_unchanged):
    print("as described" if is_unchanged else "the behaviour has changed", flush=True)
    os._exit(not is_unchanged)


async def main():
    print("grpcio", grpc.__version__)
    keepalive = await seconds_until_back([("grpc.keepalive_timeout_ms", 2000)])
    ping = await seconds_until_back([("grpc.http2.ping_timeout_ms", 2000)])
    print(f"grpc.keepalive_timeout_ms=2000: calls work again after {keepalive:.0f} s (20: not at all)")
    print(f"grpc.http2.ping_timeout_ms=2000: calls work again after {ping:.0f} s")
    end(keepalive >= 20 and ping < 10)


asyncio.run(main())
PY
"$folder/venv/bin/python" "$folder/try.py"
