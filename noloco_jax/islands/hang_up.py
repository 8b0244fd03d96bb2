"""Ends a call from the side that was called, which Arrow Flight cannot: it lets callers alone cancel."""

import contextlib
import os
import socket
import stat
from urllib.parse import unquote


def hang_up(peer: str) -> None:
    """Shuts this process's connection with `peer` down, so that every read and write of a call on it ends.

    Args:
      peer: the caller's address as gRPC writes it, such as "ipv4:127.0.0.1:41894" or "ipv6:%5B::1%5D:41894". Islands
        make a connection for every call, so that no other call ends.
    """
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or no connection
            descriptor = int(name)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if _written(connection) == unquote(peer):
                    connection.shutdown(socket.SHUT_RDWR)


def _written(connection: socket.socket) -> str:
    """The address of a connection's other end, as gRPC writes it."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return ""
    host, port = connection.getpeername()[:2]
    host = host.removeprefix("::ffff:")
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
