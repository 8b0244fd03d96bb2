"""Shows who waits when a process is late, over real processes on this machine: with NoLoCo its partners, else all.

    python -m noloco_jax.lateness --config=configs/quickstart.py --workdir=DIR --processes=8 --late=3:30:5

runs the configuration with each method, one process a replica, process 3 sleeping 5 seconds before step 30. Of every
outer step it prints how long each process was in it; processes that earlier meetings link to the late one are marked.
The processes compute on the CPU; set JAX_PLATFORMS=cuda on a machine with as many GPUs, and each takes one of its own.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from noloco_jax.cluster.join import joined
from noloco_jax.cluster.place import define_flags, find_place
from noloco_jax.config import CONFIG_FILE, TrainConfig, parse_args, to_dict, validate
from noloco_jax.errors import UserError
from noloco_jax.files import check_writable, folder_of_flag, write_whole
from noloco_jax.methods import METHODS, method_of
from noloco_jax.outer.pairing import Round
from noloco_jax.run.console import make_console
from noloco_jax.run.loop import Hooks
from noloco_jax.run.metrics import read_metrics
from noloco_jax.train.training import train

_METHODS = tuple(name for name, method in METHODS.items() if method.has_outer_steps)


@dataclass(frozen=True)
class Late:
    """A process that sleeps before a step."""

    process: int
    step: int
    seconds: float


def linked(rounds: Sequence[Round], late: Sequence[Late], sync_every: int) -> list[set[int]]:
    """For every round, the replicas that can have to wait: those that meetings link to a late one, and it itself.

    Args:
      rounds: who averages with whom.
      late: one process a replica.
      sync_every: inner steps between rounds; round r follows step (r + 1) * sync_every.
    """
    reached: set[int] = set()
    history = []
    for number, groups in enumerate(rounds):
        reached |= {x.process for x in late if number * sync_every < x.step <= (number + 1) * sync_every}
        reached = reached.union(*(group for group in groups if reached.intersection(group)))
        history.append(set(reached))
    return history


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the processes, or, as one of them, trains with the delays."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    config, flags = parse_args(arguments, __doc__ or "", _define_flags, prog="python -m noloco_jax.lateness")
    late = [_parse(text) for text in flags.late]
    if flags.worker:
        return _train(config, flags.workdir, flags, late)
    _check(config, flags, late)
    check_writable(flags.workdir)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # not without ending the processes
    console = make_console()
    results = {}
    for method in flags.methods.split(","):
        folder, run = flags.workdir / method, replace(config, method=method)
        common = f"--config.outer.sync_every={run.outer.sync_every}"  # and not each method's own
        own = [f"--workdir={folder}", f"--config.method={method}", common, "--worker"]  # the last of a flag counts
        _launch([*arguments, *own], flags.processes, folder)
        results[method] = measured(folder, run, late)
        _show(console, method, results[method])
    path = write_whole(flags.workdir / "lateness.json", json.dumps(results, indent=1))
    console.print(f"the figures: {path}")
    return 0


def _define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workdir",
        required=True,
        type=folder_of_flag,
        metavar="DIR",
        help="where the runs go, a folder for each method",
    )
    parser.add_argument("--processes", type=int, required=True, metavar="N", help="processes, one a replica")
    parser.add_argument("--late", action="append", default=[], metavar="PROCESS:STEP:SECONDS", help="may be repeated")
    parser.add_argument("--methods", default="noloco,diloco", help="comma-separated (default %(default)s)")
    parser.add_argument("--worker", action="store_true", help="be one of the processes")
    define_flags(parser)


def _check(config: TrainConfig, flags: argparse.Namespace, late: Sequence[Late]) -> None:
    """Raises `UserError` for what would show only once the processes have trained."""
    if flags.processes != config.num_replicas:
        raise UserError(
            f"--processes={flags.processes} and num_replicas={config.num_replicas}: give one process a replica"
        )
    for x in late:
        if not (0 <= x.process < flags.processes and 0 < x.step <= config.num_steps):
            raise UserError(f"--late={x.process}:{x.step}:{x.seconds:g} is of no process or step: see --processes")
    if config.outer.fragments != 1:
        raise UserError(
            f"outer.fragments={config.outer.fragments}: who waits is measured of outer steps that are evenly apart, "
            "one every sync_every: leave it at 1"
        )
    for method in flags.methods.split(","):
        if method not in _METHODS:
            raise UserError(
                f"--methods={flags.methods}: {method!r} has no outer steps, choose from {','.join(_METHODS)}"
            )
        run = replace(config, method=method)
        validate(run)
        if run.outer.sync_every > run.num_steps:
            raise UserError(
                f"outer.sync_every={run.outer.sync_every} is more than num_steps={run.num_steps}, "
                "which leaves no outer step: lower it, or raise num_steps"
            )
        folder = flags.workdir / method
        if (folder / CONFIG_FILE).exists():
            raise UserError(f"{folder} holds a run already: give another --workdir, or delete that folder")


def _parse(text: str) -> Late:
    try:
        process, step, seconds = text.split(":")
        late = Late(int(process), int(step), float(seconds))
    except ValueError:
        raise UserError(f"--late={text} is not PROCESS:STEP:SECONDS, such as 3:30:5") from None
    if not 0 <= late.seconds < math.inf:
        raise UserError(f"--late={text}: {seconds} is no time to be late by, give seconds from 0")
    return late


def _train(config: TrainConfig, workdir: Path, flags: argparse.Namespace, late: Sequence[Late]) -> int:
    """Trains as one of the processes, which sleeps before the steps that it is late at."""
    place = find_place(flags, os.environ)
    process = 0 if place is None else place.process_id
    with joined(place, to_dict(config), flags.start_timeout):
        return train(config, workdir, hooks=_Sleep([x for x in late if x.process == process]))


class _Sleep(Hooks):
    """Makes a process late."""

    def __init__(self, late: Sequence[Late]):
        self._late = late

    def before_step(self, step: int) -> None:
        time.sleep(sum(x.seconds for x in self._late if x.step == step))


def _launch(arguments: Sequence[str], number: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    port = 61440 + os.getpid() % 4096
    shared = os.environ | {
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS") or "cpu",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(number),
    }
    running = []
    try:
        for process in range(number):
            with (folder / f"log.{process}.txt").open("w") as log:
                running.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "noloco_jax.lateness", *arguments],
                        env=shared | {"JAX_PROCESS_ID": str(process), "JAX_LOCAL_DEVICE_IDS": str(process)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        unfinished = True
        while unfinished:
            unfinished = any(process.poll() is None for process in running)
            failed = [i for i, process in enumerate(running) if process.poll()]
            if failed:
                log = folder / f"log.{failed[0]}.txt"
                last = (log.read_text().strip().splitlines() or ["no word"])[-1]
                raise UserError(
                    f"process {failed[0]} ended with status {running[failed[0]].returncode}: {last} ({log})"
                )
            time.sleep(0.1)
    finally:
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


def measured(folder: Path, config: TrainConfig, late: Sequence[Late]) -> list[dict[str, Any]]:
    """Of every round: its step and groups, the processes that can wait, and the seconds that each spent in it."""
    method, sync_every = method_of(config), config.outer.sync_every
    rounds = [method.groups(config, round) for round in range(config.num_steps // sync_every)]
    waited = [
        {
            line["step"]: line["outer_step_seconds"]
            for line in read_metrics(folder, process)
            if "outer_step_seconds" in line
        }
        for process in range(config.num_replicas)
    ]
    can_wait = linked(rounds, late, sync_every)
    return [
        {
            "step": (r + 1) * sync_every,
            "groups": groups,
            "can_wait": sorted(can_wait[r]),
            "seconds": [seconds[(r + 1) * sync_every] for seconds in waited],
        }
        for r, groups in enumerate(rounds)
    ]


def _show(console: Console, method: str, rows: Sequence[dict[str, Any]]) -> None:
    title = f"{method}: seconds that each process was in an outer step (* linked to a late one)"
    table = Table("step", title=title, title_justify="left")
    for process in range(len(rows[0]["seconds"])):
        table.add_column(str(process), justify="right")
    for row in rows:
        cells = [f"{s:.2f}" + ("*" if i in row["can_wait"] else " ") for i, s in enumerate(row["seconds"])]
        table.add_row(str(row["step"]), *cells)
    console.print(table)
