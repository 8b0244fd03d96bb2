"""TCP proxies in front of islands: links of a limited rate, latency, and connections that a NAT has forgotten."""

import asyncio
import socket
import threading
from collections.abc import Sequence

READ_BYTES, BUFFER_BYTES = 8 << 10, 32 << 10
BURST_SECONDS = 0.05  # by which a late wake-up may be made up for


class Link:
    """One direction of a node's link: all bytes that are sent over it, in the order of their coming.

    Args:
      rate: bytes/s.
    """

    def __init__(self, rate: float):
        self.rate, self.num_bytes, self._free = rate, 0, 0.0

    def carry(self, num_bytes: int, now: float) -> float:
        """Return when these bytes have passed."""
        self._free = max(self._free, now - BURST_SECONDS) + num_bytes / self.rate
        self.num_bytes += num_bytes
        return self._free


class Proxy:
    """A proxy on a loopback port of its own; a context that runs it in a thread.

    Args:
      port: of the listener behind it.
      there: links that data to the listener passes, at the rate of the slowest.
      back: those that data from the listener passes.
      latency: seconds one way.
    """

    def __init__(self, port: int, there: Sequence[Link] = (), back: Sequence[Link] = (), latency: float = 0.0):
        self._target, self._there, self._back, self._latency = port, there, back, latency
        self._generation = 0  # of connections: those of earlier ones are dead
        self.num_connections = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self.port: int = listening.getsockname()[1]
        self._socket = listening

    def __enter__(self) -> "Proxy":
        self._thread.start()
        serving = asyncio.start_server(self._serve, sock=self._socket, limit=READ_BYTES)
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result()
        return self

    def __exit__(self, *_) -> None:
        async def end() -> None:
            self._server.close()
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def forget(self) -> None:
        """Swallow all that comes over the connections so far, and leave them open; new ones work."""
        self._generation += 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", self._target, limit=READ_BYTES)
        except OSError:
            writer.close()
            return
        generation = self._generation
        self.num_connections += 1
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, there[1], self._there, generation))
                group.create_task(self._pump(there[0], writer, self._back, generation))
        except* (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            for one in (writer, there[1]):
                one.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, links: Sequence[Link], generation: int
    ) -> None:
        writer.transport.set_write_buffer_limits(BUFFER_BYTES)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        loop = asyncio.get_running_loop()
        while data := await reader.read(READ_BYTES):
            passed = max((link.carry(len(data), loop.time()) for link in links), default=0.0)
            await asyncio.sleep(max(passed - loop.time(), 0.0))
            if generation != self._generation:
                continue
            if self._latency:
                loop.call_later(self._latency, writer.write, data)
            else:
                writer.write(data)
                await writer.drain()
        if generation == self._generation:
            raise ConnectionResetError
        await asyncio.Event().wait()
