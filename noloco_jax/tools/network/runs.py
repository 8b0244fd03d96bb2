"""Runs over the hosts of a slow network: the trainer with a process on each host, or islands."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noloco_jax.errors import UserError
from noloco_jax.islands import members
from noloco_jax.tools.network.links import Hosts

_POLL_SECONDS = 0.2
_STOP_SECONDS = 30.0  # for processes to end after SIGTERM
_COORDINATOR_PORT, _ISLAND_PORT = 7000, 7070


def train(hosts: Hosts, number: int, config: Path, workdir: Path) -> None:
    """Train a configuration with a process on each of `number` hosts, in one workdir.

    Raises:
      UserError: if a process fails; it names the log and the last line of it.
    """
    command = [sys.executable, "-m", "noloco_jax.train", f"--config={config}", f"--workdir={workdir}"]
    of_all = {"JAX_COORDINATOR_ADDRESS": f"{hosts.address(0)}:{_COORDINATOR_PORT}", "JAX_NUM_PROCESSES": str(number)}
    run_on_hosts(
        hosts, [command] * number, workdir, [{**of_all, "JAX_PROCESS_ID": str(host)} for host in range(number)]
    )


def train_islands(hosts: Hosts, number: int, config: Path, workdir: Path) -> None:
    """Train a configuration as islands, one on each host, with the workdirs WORKDIR/host0, WORKDIR/host1, ...

    Raises:
      UserError: as `train` does.
    """
    roster, keys = workdir / "roster.toml", workdir / "keys"
    if not roster.exists():
        rows = [f'[[island]]\nname = "host{i}"\naddress = "{hosts.address(i)}:{_ISLAND_PORT}"\n' for i in range(number)]
        roster.write_text("\n".join(['run = "network"\n', *rows]))
    with (workdir / "keys.log").open("w") as log, contextlib.redirect_stdout(log):
        members.keys(argparse.Namespace(roster=roster, out=keys, days=90, replace=[]))  # those that are missing
    common = [sys.executable, "-m", "noloco_jax.island", "train", f"--config={config}", f"--roster={roster}"]
    own = [[f"--name=host{i}", f"--keys={keys}/host{i}", f"--workdir={workdir}/host{i}"] for i in range(number)]
    run_on_hosts(hosts, [[*common, *flags] for flags in own], workdir, [{}] * number)


def run_on_hosts(
    hosts: Hosts, commands: Sequence[Sequence[str]], workdir: Path, variables: Sequence[dict[str, str]]
) -> None:
    """Run a command on each host to its end, with its output in WORKDIR/hostI.log; if one fails, end the others.

    Raises:
      UserError: if one fails.
    """
    logs = [workdir / f"host{host}.log" for host in range(len(commands))]
    processes: list[subprocess.Popen[Any]] = []
    try:
        for host, (command, log, own) in enumerate(zip(commands, logs, variables, strict=True)):
            with log.open("ab") as output:
                options = {"stdout": output, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
                environment = os.environ | {"JAX_PLATFORMS": "cpu"} | own
                processes.append(hosts.start(host, command, env=environment, **options))
        while True:
            statuses = [process.poll() for process in processes]
            if failed := [i for i, status in enumerate(statuses) if status]:
                words = logs[failed[0]].read_text(errors="replace").strip().splitlines() or ["no word"]
                raise UserError(f"the process on host{failed[0]} failed: {words[-1]} ({logs[failed[0]]})")
            if None not in statuses:
                break
            time.sleep(_POLL_SECONDS)
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        for process in processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # workers that read data too
                process.wait()
