"""Measure how long late processes hold up the others, by method and delay, in real processes on this machine.

    python -m noloco_jax.lateness --config=configs/quickstart.py --workdir=runs/late

trains the configuration for a few steps with each method, one process a replica, and lets a process sleep before a
step. The table shows how long training stood: the seconds in outer steps, which wait for late partners and for
corrections that are due. noloco runs once for each of `--delays`. Every process sleeps `--step_seconds` before each
step, which stands for the computation of a larger model that a delayed exchange overlaps with. The processes compute on
the CPU; set JAX_PLATFORMS=cuda on a machine with as many GPUs, and each takes one of its own.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from noloco_jax.cluster.host import use_cpu_cores
from noloco_jax.cluster.join import joined
from noloco_jax.cluster.place import define_flags, find_place
from noloco_jax.config import CONFIG_FILE, TrainConfig, parse_args, to_dict
from noloco_jax.errors import UserError
from noloco_jax.files import check_writable, folder_of_flag, write_whole
from noloco_jax.formatting import format_seconds
from noloco_jax.methods import METHODS, method_of
from noloco_jax.outer.pairing import Round
from noloco_jax.run.console import make_console
from noloco_jax.run.loop import Hooks
from noloco_jax.run.metrics import METRICS_FILE, read_metrics
from noloco_jax.train.training import train

_METHODS = tuple(name for name, method in METHODS.items() if method.has_outer_steps)
_PROG = "python -m noloco_jax.lateness"


@dataclass(frozen=True)
class Late:
    """Sleep of a process before a step."""

    process: int
    step: int
    seconds: float


@dataclass(frozen=True)
class Variant:
    """A method with a delay, and the configuration of its run."""

    name: str
    folder: Path
    flags: list[str]
    config: TrainConfig


def linked(rounds: Sequence[tuple[int, Round]], late: Sequence[Late]) -> list[set[int]]:
    """Return, for every round, the replicas that exchanges so far connect to a late one, itself included.

    Args:
      rounds: (step after which the round follows, its groups).
      late: the sleeps, with one process a replica.
    """
    reached: set[int] = set()
    history = []
    for step, groups in rounds:
        reached |= {x.process for x in late if x.step <= step}
        reached = reached.union(*(group for group in groups if reached.intersection(group)))
        history.append(set(reached))
    return history


def main(argv: Sequence[str] | None = None) -> int:
    """Run the processes of each variant and compare them; with --worker, train as one of the processes."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    config, flags = parse_args(arguments, __doc__ or "", _define_flags, prog=_PROG)
    late = [_parse(text) for text in flags.late or [_usual_late(config)]]
    if flags.worker:
        return _train(config, flags.workdir, flags, late)
    variants = _variants(config, flags, arguments, late)
    check_writable(flags.workdir)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # an exception ends the processes
    console = make_console()
    for x in late:
        console.print(f"process {x.process} of {config.num_replicas} is {x.seconds:g} s late before step {x.step}")
    results = {}
    for number, variant in enumerate(variants, start=1):
        what = f"{variant.name} ({number} of {len(variants)})"
        console.print(f"{what}: {config.num_replicas} processes compile, then take {flags.steps} steps")
        with console.status(what) as status:  # shown on a terminal only
            _launch(
                [*arguments, *variant.flags, "--worker"],
                config.num_replicas,
                variant.folder,
                lambda step, what=what, status=status: status.update(f"{what}: step {step}/{flags.steps}"),
            )
        results[variant.name] = measured(variant.folder, variant.config, late)
    path = write_whole(flags.workdir / "lateness.json", json.dumps(results, indent=1))
    stood = {name: seconds_stood(rows) for name, rows in results.items()}
    held = {x.name: held_up(results[x.name], late, config.outer.sync_every + x.config.outer.delay) for x in variants}
    _show(console, stood, held, late)
    console.print(f"every outer step of every process: {path}")
    console.print(summary(stood, late))
    return 0


def _define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workdir",
        required=True,
        type=folder_of_flag,
        metavar="DIR",
        help="where the runs go, a folder for each variant",
    )
    parser.add_argument(
        "--late",
        action="append",
        metavar="PROCESS:STEP:SECONDS",
        help="may be repeated (default: the last process, 2 s, in the middle of the second round)",
    )
    parser.add_argument("--methods", default="noloco,diloco", help="comma-separated (default %(default)s)")
    parser.add_argument(
        "--delays", help="values of outer.delay for noloco, comma-separated (default 0 and the config's, or sync_every)"
    )
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="steps of each run (default %(default)s)")
    parser.add_argument(
        "--step_seconds", type=float, default=0.2, metavar="S", help="sleep before each step (default %(default)s)"
    )
    parser.add_argument("--worker", action="store_true", help="be one of the processes")
    define_flags(parser)


def _variants(
    config: TrainConfig, flags: argparse.Namespace, arguments: Sequence[str], late: Sequence[Late]
) -> list[Variant]:
    """Return the runs to compare.

    Raises:
      UserError: for mistakes that would otherwise show only after the processes have trained.
    """
    for x in late:
        if not (0 <= x.process < config.num_replicas and 0 < x.step <= flags.steps):
            raise UserError(
                f"--late={x.process}:{x.step}:{x.seconds:g} names no process or step: there are "
                f"num_replicas={config.num_replicas} processes and --steps={flags.steps}, choose among these"
            )
    if not 0 <= flags.step_seconds < math.inf:
        raise UserError(f"--step_seconds={flags.step_seconds}: give seconds from 0")
    if config.outer.sync_every > flags.steps:
        raise UserError(
            f"outer.sync_every={config.outer.sync_every} is more than --steps={flags.steps}, "
            "which leaves no outer step: lower it, or raise --steps"
        )
    common = {"num_steps": flags.steps, "outer.sync_every": config.outer.sync_every, "inner.warmup_steps": 0}
    # Metrics are written every step; evaluations and saves, for which all processes wait, happen only at the end.
    common |= {"log_every": 1, "eval_every": flags.steps, "checkpoint_every": flags.steps, "eval_batches": 1}
    variants = []
    for method in flags.methods.split(","):
        if method not in _METHODS:
            raise UserError(
                f"--methods={flags.methods}: {method!r} has no outer steps, choose from {','.join(_METHODS)}"
            )
        for delay in _delays(config, flags) if method == "noloco" else [0]:
            folder = flags.workdir / (f"{method}_delay{delay}" if delay else method)
            if (folder / CONFIG_FILE).exists():
                raise UserError(f"{folder} holds a run already: give another --workdir, or delete that folder")
            fields = {"method": method, "outer.delay": delay, "sample_tokens": 0} | common
            own = [f"--workdir={folder}", *(f"--config.{name}={value}" for name, value in fields.items())]
            run, _ = parse_args([*arguments, *own], "", _define_flags, prog=_PROG)  # the last value of a flag counts
            name = f"{method}, delay {delay}" if method == "noloco" else method
            variants.append(Variant(name, folder, own, run))
    return variants


def _delays(config: TrainConfig, flags: argparse.Namespace) -> list[int]:
    if flags.delays is None:
        return [0, config.outer.delay or config.outer.sync_every]
    try:
        return sorted({int(text) for text in flags.delays.split(",")})
    except ValueError:
        raise UserError(f"--delays={flags.delays}: give numbers of steps, separated by commas") from None


def _usual_late(config: TrainConfig) -> str:
    return f"{config.num_replicas - 1}:{config.outer.sync_every + (config.outer.sync_every + 1) // 2}:2"


def _parse(text: str) -> Late:
    try:
        process, step, seconds = text.split(":")
        late = Late(int(process), int(step), float(seconds))
    except ValueError:
        raise UserError(f"--late={text} is not PROCESS:STEP:SECONDS, such as 3:16:2") from None
    if not 0 <= late.seconds < math.inf:
        raise UserError(f"--late={text}: {seconds} is not a duration, give seconds from 0")
    return late


def _train(config: TrainConfig, workdir: Path, flags: argparse.Namespace, late: Sequence[Late]) -> int:
    """Train as one of the processes, with sleeps before its steps."""
    place = find_place(flags, os.environ)
    process = 0 if place is None else place.process_id
    use_cpu_cores(config, 1 if place is None else place.num_processes)
    with joined(place, to_dict(config), flags.start_timeout):
        hooks = _Sleep([x for x in late if x.process == process], flags.step_seconds)
        return train(config, workdir, hooks=hooks)


class _Sleep(Hooks):
    """Callback that sleeps before every step, and longer before steps at which the process is late."""

    def __init__(self, late: Sequence[Late], step_seconds: float):
        self._late, self._step_seconds = late, step_seconds

    def before_step(self, step: int) -> None:
        time.sleep(self._step_seconds + sum(x.seconds for x in self._late if x.step == step))


def _launch(arguments: Sequence[str], number: int, folder: Path, report: Callable[[int], None]) -> None:
    """Run the processes to their end, and report their current step about once a second."""
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
        unfinished, reported = True, 0.0
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
            if (folder / METRICS_FILE).exists() and time.monotonic() - reported > 1:
                reported = time.monotonic()
                report(max((line["step"] for line in read_metrics(folder)), default=0))
    finally:
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


def measured(folder: Path, config: TrainConfig, late: Sequence[Late]) -> list[dict[str, Any]]:
    """Return a row for every step at which training waited for an outer step or a correction.

    A row has the step, the groups of its outer steps (none if it only waited for a correction), the processes connected
    to a late one so far, and the seconds that each process waited.
    """
    method = method_of(config)
    lines = [
        {line["step"]: line for line in read_metrics(folder, process) if "outer_step_seconds" in line}
        for process in range(config.num_replicas)
    ]
    rows, taken = [], 0
    for step in sorted(set().union(*lines)):
        last = max((own[step]["round"] for own in lines if "round" in own.get(step, {})), default=taken - 1)
        rounds = [method.groups(config, number) for number in range(taken, last + 1)]
        taken = last + 1
        seconds = [own[step]["outer_step_seconds"] if step in own else 0.0 for own in lines]
        rows.append({"step": step, "groups": rounds, "seconds": seconds})
    links = iter(linked([(row["step"], groups) for row in rows for groups in row["groups"]], late))
    reached: set[int] = set()
    for row in rows:
        for _ in row["groups"]:
            reached = next(links)
        row["linked"] = sorted(reached)
    return rows


def seconds_stood(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Return the total seconds that each process waited."""
    return [sum(seconds) for seconds in zip(*(row["seconds"] for row in rows), strict=True)]


def held_up(rows: Sequence[dict[str, Any]], late: Sequence[Late], window: int) -> int:
    """Count the punctual processes that waited at least half of a lateness within `window` steps of it."""
    found = set()
    for x in late:
        near = [row["seconds"] for row in rows if x.step <= row["step"] < x.step + window]
        found |= {i for i, seconds in enumerate(zip(*near, strict=True)) if sum(seconds) >= x.seconds / 2 > 0}
    return len(found - {x.process for x in late})


def _others(stood: Sequence[float], late: Sequence[Late]) -> list[float]:
    tardy = {x.process for x in late}
    return [seconds for process, seconds in enumerate(stood) if process not in tardy] or list(stood)


def _show(console: Console, stood: dict[str, list[float]], held: dict[str, int], late: Sequence[Late]) -> None:
    headings = ("held up", "mean", "most", "late", "all")
    title = "others held up at once; seconds that training stood: the others' mean and most, the late ones', all"
    table = Table("", title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, seconds in stood.items():
        others = _others(seconds, late)
        tardy = sum(seconds) - sum(others)
        cells = [sum(others) / len(others), max(others), tardy, sum(seconds)]
        table.add_row(name, f"{held[name]} of {len(others)}", *(f"{x:.2f}" for x in cells))
    console.print(table)


def summary(stood: dict[str, list[float]], late: Sequence[Late]) -> str:
    """Return the result in a sentence: the mean seconds that punctual processes waited, by variant."""
    means = {name: sum(others) / len(others) for name, own in stood.items() for others in [_others(own, late)]}
    least = min(means, key=lambda name: means[name])
    figures = "; ".join(f"{format_seconds(seconds)} with {name}" for name, seconds in means.items())
    lateness = format_seconds(sum(x.seconds for x in late))
    return f"For {lateness} of lateness each of the others stood, on average, {figures}: least with {least}."
