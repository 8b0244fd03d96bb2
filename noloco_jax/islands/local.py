"""All islands of a run on this machine: roster, keys, a process for each, restarts, and the merged model at the end."""

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from noloco_jax.cores import keep_on, usable_cores
from noloco_jax.errors import INTERRUPTED, RESTART, UserError, tell
from noloco_jax.files import one_command_in
from noloco_jax.islands import members
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.ask import discover, open_run
from noloco_jax.metrics.console import make_console

_MAX_STARTS = 11
_TELL_EVERY_SECONDS, _TELL_SECONDS = 10.0, 1.0  # interval of telling who has gone; timeout of an answer
_ISLAND = (sys.executable, "-m", "noloco_jax.island")


def local(flags: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Train `flags.number` islands, merge those that come to their end, and return the exit status.

    `flags.workdir` gets roster, keys and a folder for each; the arguments are passed on to each `island train`. Raises
    `UserError` if the folder is in use, or has a roster of another number of islands.
    """
    workdir, number = flags.workdir, flags.number
    if number < 2:
        raise UserError(f"{number} islands: give 2 or more")
    with one_command_in(workdir, "lock", f"islands of {workdir} are running"):
        roster = workdir / "roster.toml"
        _write_roster(roster, number)
        with (workdir / "keys.log").open("w") as log, contextlib.redirect_stdout(log):
            members.keys(argparse.Namespace(roster=roster, out=workdir / "keys", days=90, replace=[]))
        console = make_console()
        islands = [_Island(i, number, workdir, arguments, console) for i in range(number)]
        if stopped := _run(islands, workdir, console):
            console.print("[launcher] all islands have stopped: the same command resumes")
            return stopped
        complete = [str(island.folder) for island in islands if island.status == 0]
        failed = next((island.status for island in islands if island.status), 0)
        if not complete:
            return failed
        merged = workdir / "merged"
        if merged.exists():
            former = workdir / "merged.old"
            shutil.rmtree(former, ignore_errors=True)
            merged.rename(former)
        command = [*_ISLAND, "merge", f"--out={merged}", "--evaluate", "--workdirs", *complete]
        status = subprocess.run(command, check=False).returncode
        if failed:
            tell(f"[launcher] {len(complete)} of {number} islands have come to the end")
        return status or failed


def _write_roster(path: Path, number: int) -> None:
    """Write the roster, with ports that are free now."""
    if path.exists() and (before := len(re.findall(r"^\[\[island\]\]", path.read_text(), re.MULTILINE))) != number:
        raise UserError(f"{path} is of {before} islands: give their number, or another --workdir")
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        ports = [opened.getsockname()[1] for opened in sockets]
    rows = [f'\n[[island]]\nname = "island{i}"\naddress = "127.0.0.1:{port}"\n' for i, port in enumerate(ports)]
    path.write_text('run = "islands"\n' + "".join(rows))


class _Island:
    """One island, whose process starts again after it was killed or failed.

    Attributes:
      status: exit status of the process that is its last; None while there may be another one.
    """

    def __init__(self, number: int, count: int, workdir: Path, arguments: Sequence[str], console: Console):
        self.name, self.folder, self.status = f"island{number}", workdir / f"island{number}", None
        self.folder.mkdir(exist_ok=True)
        self.log = self.folder / "log"
        cores = usable_cores()
        self._cores = cores[number::count] or [cores[number % len(cores)]]
        self._environment = os.environ | _gpu_of(number, count)
        self._command = [
            *(*_ISLAND, "train", *arguments, f"--config.num_replicas={count}", f"--roster={workdir}/roster.toml"),
            *(f"--name={self.name}", f"--keys={workdir}/keys/{self.name}", f"--workdir={self.folder}"),
        ]
        self._starts, self._console = 0, console

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # a terminal's Ctrl-C is for the launcher alone
            )
        keep_on(self._process.pid, self._cores)
        self._starts += 1
        self._console.print(f"[launcher] {self.name} is process {self._process.pid}, its log {self.log}")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def watch(self, stopping: bool) -> None:
        """Note the process's end, and start another one where that may help."""
        code = self._process.poll()
        if code is None:
            return
        code = 128 - code if code < 0 else code  # as shells have it
        if code and not stopping and (code in (1, RESTART) or code > 128) and self._starts < _MAX_STARTS:
            tell(f"[launcher] {self.name} was ended (exit status {code}): it starts again")
            self.start()
            return
        self.status = code
        if code and not stopping:
            tell(f"[launcher] {self.name} exited with {code} and is given up, the others go on; its log ends with")
            tell("\n".join(self.log.read_text(errors="replace").splitlines()[-3:]))


def _gpu_of(number: int, count: int) -> dict[str, str]:
    """Return the variables that give an island its GPU, and its share of the memory where it is not alone there."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        gpus = [str(i) for i, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    else:
        gpus = visible.replace(",", " ").split()
    if not gpus:
        return {}
    variables = {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]}
    if count > len(gpus) and not {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & os.environ.keys():
        variables["XLA_CLIENT_MEM_FRACTION"] = f"{0.9 / -(-count // len(gpus)):.2f}"
    return variables


def _tell_ended(workdir: Path, island: _Island) -> None:
    """Tell the others, in the name of an island whose process has ended for good, that nobody need wait for it."""
    with contextlib.suppress(UserError):  # of its keys: it has said so itself
        run = open_run(workdir / "roster.toml", workdir / "keys" / island.name)
        discover(run, _TELL_SECONDS, phase=pb.Status.GONE if island.status else pb.Status.MERGED)


def _run(islands: Sequence[_Island], workdir: Path, console: Console) -> int:
    """Run the islands to their ends, and show the first one's log; return the exit status of a stop, or 0."""
    forwarded = told = 0
    tell_at = 0.0  # again and again, for islands that have started since
    with islands[0].log.open("a+b") as log, _received_signals() as received:  # the log from its end on
        for island in islands:
            island.start()
        while running := [island for island in islands if island.status is None]:
            time.sleep(0.2)
            for number in received[forwarded:]:
                at_once = number == signal.SIGINT and forwarded > 0
                forwarded += 1
                for island in running:
                    island.signal(signal.SIGKILL if at_once else signal.SIGTERM)
            for island in running:
                island.watch(stopping=forwarded > 0)
            ended = [island for island in islands if island.status is not None]
            if ended and len(ended) < len(islands) and not forwarded and time.monotonic() >= tell_at:
                _tell_ended(workdir, ended[told % len(ended)])  # one at a time, so that signals are heard soon
                told += 1
                tell_at = time.monotonic() + _TELL_EVERY_SECONDS / len(ended)
            console.print(log.read().decode(errors="replace"), end="")
    return INTERRUPTED if signal.SIGINT in received else RESTART if received else 0


@contextlib.contextmanager
def _received_signals() -> Iterator[list[int]]:
    """Give a list to which signals that stop a run are added; a SIGHUP stays ignored where it was, as under nohup."""
    received: list[int] = []
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in former.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
