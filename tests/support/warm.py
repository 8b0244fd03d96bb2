"""Processes of `python -m MODULE` whose imports are done before they begin, for tests that start many small runs.

Importing JAX, Orbax and Matplotlib takes longer than such a run. A server imports them once and forks for each run.
What it forks becomes a child of the test's process, with arguments, environment, folder and streams of its own: a test
waits for it and sends it signals like any other. The server starts no backend, and no thread that a fork would lose.
"""

import atexit
import ctypes
import gc
import importlib
import inspect
import io
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from support.paths import ROOT

IMPORTS = (
    *("noloco_jax.train.command", "noloco_jax.train.run", "noloco_jax.islands.command", "noloco_jax.optim.transforms"),
    *("noloco_jax.data.prefetch", "support.disturbed", "support.tiny_model"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg", "tensorboardX"),
)
READ_BY_IMPORTS = ("JAX_", "PYTHON", "TF_")  # how the variables begin for which a server is needed of its own
READ_BY_RUNS = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS")
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
LONGEST_REQUEST = 2**17

_servers: dict[tuple[tuple[str, str], ...], socket.socket] = {}
_one_at_a_time = threading.Lock()


class Popen(subprocess.Popen):
    """A `subprocess.Popen` of `[sys.executable, "-m", MODULE, ARGUMENT...]` that forks a server instead, on Linux."""

    def _execute_child(self, *arguments: Any) -> None:
        anew = super()._execute_child  # pyright: ignore[reportAttributeAccessIssue]
        if sys.platform != "linux":
            return anew(*arguments)
        given = inspect.signature(anew).bind(*arguments).arguments
        python, option, *command = map(str, given["args"])
        assert (python, option) == (sys.executable, "-m"), given["args"]
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        request = {
            "command": command,
            "folder": str(given["cwd"] or os.getcwd()),
            "env": dict(given["env"] or os.environ),
        }
        with _one_at_a_time:
            self.pid = _fork(request, [own if stream == -1 else stream for own, stream in enumerate(streams)])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))  # pyright: ignore[reportAttributeAccessIssue]


def _fork(request: Mapping[str, Any], streams: list[int]) -> int:
    """Have a server fork, and return the number of the new process, which is a child of this one."""
    server = _server(request["env"])
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        socket.send_fds(server, [json.dumps(request).encode()], streams)
        number = server.recv(LONGEST_REQUEST)
        assert server.recv(LONGEST_REQUEST) == b"adopted", "the server has ended: its output says why"
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)
    return int(number)


def _server(env: Mapping[str, str]) -> socket.socket:
    """Return the connection to the server for an environment, which ends with this process."""
    settings = {name: x for name, x in env.items() if name.startswith(READ_BY_IMPORTS) and name not in READ_BY_RUNS}
    key = tuple(sorted(settings.items()))
    if key not in _servers:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        others = {name: x for name, x in os.environ.items() if not name.startswith(READ_BY_IMPORTS)}
        with theirs:
            started = subprocess.Popen(
                [sys.executable, "-m", "support.warm", str(theirs.fileno())],
                env=others | settings,
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(_end, ours, started)
        _servers[key] = ours
    return _servers[key]


def _end(server: socket.socket, started: subprocess.Popen[bytes]) -> None:
    server.close()
    started.wait()


def _serve(tests: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each request, and return it with its streams in the new process; in the server return at the end.

    The process between server and new one ends at once, which makes the new one a child of who asked.
    """
    while True:
        message, streams, _, _ = socket.recv_fds(tests, LONGEST_REQUEST, 3)
        if not message:
            return None
        if (between := os.fork()) == 0:
            between = os.getpid()
            if number := os.fork():
                tests.send(str(number).encode())
                os._exit(0)
            tests.close()
            while os.getppid() == between:
                time.sleep(0.001)
            return json.loads(message), streams
        os.waitpid(between, 0)
        tests.send(b"adopted")
        for stream in streams:
            os.close(stream)


def main() -> None:
    for name in IMPORTS:
        importlib.import_module(name)
    gc.freeze()  # what is never written stays shared by all forks
    if (asked := _serve(socket.socket(fileno=int(sys.argv[1])))) is None:
        return
    request, streams = asked
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    for name, number in (("stdout", 1), ("stderr", 2)):  # the server's may be of another kind: files, not pipes
        stream = io.TextIOWrapper(
            io.FileIO(number, "w", closefd=False), "utf-8", "backslashreplace", write_through=True
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    module, *arguments = request["command"]
    sys.path[0] = request["folder"]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
