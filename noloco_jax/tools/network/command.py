"""Train on slow links between network namespaces of this machine, and compare methods by time.

    python -m noloco_jax.network --config=configs/c4_bytes.py --config.data.path=c4/en --rates=20Mbit,100Mbit \\
        --methods=ddp,diloco,noloco --workdir=DIR

Every run has a process on each of --hosts hosts, whose link to one switch has so many bits a second in each direction
(`unlimited`: as the machine allows). --slow_rate is of the last host's link alone. --latency is the time from one host
to another. Methods and variants are those of `python -m noloco_jax.compare`, plan files `@FILE` too. --islands also
trains every noloco variant without a delay as islands, one on each host. The same command resumes.

Printed and written to DIR/network.md and DIR/network.png: seconds of a step and of an exchange, what the link needs at
least for the bytes, the share of time computing, tokens a second, perplexity, and the seconds until --perplexity is
reached. Evaluations are not counted, saves are. *computing*: the time of a step without exchanges (`local`, as many
processes) over that of a step. *exchange*: the time by which an exchange makes the run longer.

Run it as root, with iproute2 installed. The network is gone when the command ends.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noloco_jax.config import (
    CONFIG_FILE,
    TrainConfig,
    changes,
    from_dict,
    load_saved,
    make_parser,
    split_overrides,
    to_dict,
)
from noloco_jax.data import RunData
from noloco_jax.errors import UserError
from noloco_jax.files import check_writable, folder_of_flag, full_disk_reported, one_command_in, write_whole
from noloco_jax.formatting import format_bandwidth, format_seconds, parse_bandwidth, parse_seconds
from noloco_jax.islands import members
from noloco_jax.metrics.console import make_console
from noloco_jax.metrics.writer import METRICS_FILE, read_metrics
from noloco_jax.tools.compare.command import with_plans
from noloco_jax.tools.compare.plan import PlannedRun, make_plan, make_variants
from noloco_jax.tools.network.links import Hosts, check_host
from noloco_jax.tools.network.report import NetworkRow, draw_network, figures_of, network_table, step_seconds

UNLIMITED = "unlimited"
_ALONE_STEPS, _ALONE_LOG = 60, 5  # of the run that measures a step without exchanges
_POLL_SECONDS = 0.2
_STOP_SECONDS = 30.0  # for processes to end after SIGTERM
_COORDINATOR_PORT, _ISLAND_PORT = 7000, 7070


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is not finished, and write the results."""
    overrides, own = split_overrides(with_plans(list(sys.argv[1:] if argv is None else argv)))
    flags = _parser().parse_args(own)
    rates = [_rate(text, "--rates") for text in flags.rates.split(",")]
    slow_rate = None if flags.slow_rate is None else _rate(flags.slow_rate, "--slow_rate")
    latency = parse_seconds(flags.latency, "--latency", zero=True)
    plan = make_plan(flags.config, overrides, make_variants(flags.methods, flags.variant), 1)
    _check_runs(flags.hosts, plan.runs, flags.islands)
    for data, replicas, vocabulary in {
        (run.config.data, run.config.num_replicas, run.config.model.vocab_size) for run in plan.runs
    }:
        RunData(data, seed=0, vocab_size=vocabulary).check(replicas)
    check_host()
    check_writable(flags.workdir)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the runs are told to save
    console = make_console()
    with one_command_in(flags.workdir, "lock", f"{flags.workdir} is in use"), full_disk_reported(flags.workdir):
        rows: list[NetworkRow] = []
        for rate in rates:
            of_hosts = [rate] * (flags.hosts - 1) + [rate if slow_rate is None else slow_rate]
            for run, as_islands in _forms(plan.runs, flags.islands):
                name = f"{run.variant.name}{'-islands' if as_islands else ''}"
                links = _named(rate) + ("" if slow_rate is None else f", one {_named(slow_rate)}")
                console.print(f"{name} over {links}", style="dim")
                alone = _seconds_alone(run.config, flags.hosts, flags.workdir)
                title = f"{name}-{links}" + (f"-{format_seconds(latency)}" if latency else "")
                folder = flags.workdir / re.sub(r"[^\w.=+-]+", "_", title)
                workdir = _trained(folder, run.config, of_hosts, latency, as_islands)
                figures = figures_of(workdir, run.config, alone)
                rate_of_replica = min(of_hosts) if run.config.num_replicas == flags.hosts else math.inf
                rows.append(NetworkRow(name, links, rate_of_replica, figures, flags.perplexity))
                draw_network(rows, flags.workdir / "network.png", flags.perplexity)
                write_whole(flags.workdir / "network.md", network_table(rows) + "\n")
        console.print(network_table(rows))
        console.print(f"written: {flags.workdir / 'network.md'} and network.png")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__ or "", prog="python -m noloco_jax.network")
    flag = parser.add_argument
    flag("--config", required=True, metavar="FILE[:ARGUMENT]", help="noloco's; --config.FIELD=VALUE too")
    flag("--methods", help="comma-separated (default: ddp,diloco,noloco,local, none with --variant)")
    flag("--variant", action="append", default=[], metavar="NAME:FIELD=VALUE,...", help="as of compare")
    flag("--rates", required=True, metavar="RATE,RATE", help="of every host's link: 20Mbit, 1Gbit, unlimited")
    flag("--slow_rate", metavar="RATE", help="of the last host's link (default: as the others)")
    flag("--latency", default="0", metavar="TIME", help="from host to host, one way: 25ms (default 0)")
    flag("--hosts", type=int, default=4, metavar="N", help="number of hosts, a process on each (default 4)")
    flag("--islands", action="store_true", help="train noloco's variants as islands too")
    flag("--perplexity", type=float, metavar="X", help="report the seconds until a perplexity of X is reached")
    flag("--workdir", required=True, type=folder_of_flag, metavar="DIR", help="where runs and results go")
    return parser


def _rate(text: str, flag: str) -> float:
    return math.inf if text.strip() == UNLIMITED else parse_bandwidth(text.strip(), flag)


def _named(rate: float) -> str:
    return UNLIMITED if rate == math.inf else format_bandwidth(rate)


def _check_runs(hosts: int, runs: Sequence[PlannedRun], islands: bool) -> None:
    if not 2 <= hosts <= 250:
        raise UserError(f"--hosts={hosts}: give 2 to 250 hosts")
    for run in runs:
        if run.config.num_replicas % hosts:
            raise UserError(
                f"--hosts={hosts} does not divide num_replicas={run.config.num_replicas} of {run.variant.name}: give "
                "a divisor"
            )
        if islands and run.config.num_replicas != hosts:
            raise UserError(
                f"--islands trains one replica on a host, and there are {hosts} hosts for num_replicas="
                f"{run.config.num_replicas} of {run.variant.name}: make them equal"
            )
        if islands and run.config.method == "noloco" and run.config.outer.group_size > 2:
            raise UserError(
                f"--islands exchange in pairs, and {run.variant.name} has outer.group_size="
                f"{run.config.outer.group_size}: give it outer.group_size=2"
            )
        every, logged, steps = run.config.eval_every, run.config.log_every, run.config.num_steps
        if not every or every % logged:
            raise UserError(
                f"--config.eval_every={every} of {run.variant.name} is no multiple of --config.log_every={logged}, by "
                "whose lines evaluations are told from steps: change one"
            )
        if steps < 2 * max(logged, _ALONE_LOG):
            raise UserError(
                f"--config.num_steps={steps} of {run.variant.name} has fewer than two lines of a log: give at least "
                f"{2 * max(logged, _ALONE_LOG)}, or a smaller --config.log_every={logged}"
            )


def _forms(runs: Sequence[PlannedRun], islands: bool) -> list[tuple[PlannedRun, bool]]:
    """Return the runs, and True with those that are trained as islands."""
    as_islands = [run for run in runs if islands and run.config.method == "noloco" and not run.config.outer.delay]
    return [*((run, False) for run in runs), *((run, True) for run in as_islands)]


def _trained(folder: Path, config: TrainConfig, rates: Sequence[float], latency: float, as_islands: bool) -> Path:
    """Train a run unless it is finished; return the workdir with its metrics."""
    workdir = folder / "host0" if as_islands else folder
    if (workdir / CONFIG_FILE).exists():
        for field, there, here, on_resume in changes(load_saved(workdir), config):
            if on_resume != "free":
                raise UserError(
                    f"{folder} was trained with {field}={there!r} and this run has {here!r}: give the same value, or "
                    "another --workdir"
                )
    if _is_finished(workdir, config.num_steps):
        return workdir
    folder.mkdir(exist_ok=True)
    planned = folder / "planned.json"
    write_whole(planned, json.dumps(to_dict(config)))
    with Hosts(rates, latency, folder) as hosts:
        (train_islands if as_islands else train_on_hosts)(hosts, len(rates), planned, folder)
    return workdir


def _is_finished(workdir: Path, step: int) -> bool:
    if not (workdir / METRICS_FILE).exists():
        return False
    return any(line["kind"] == "eval" and line["step"] == step for line in read_metrics(workdir))


def _seconds_alone(config: TrainConfig, hosts: int, workdir: Path) -> float:
    """Return the seconds of an inner step of as many processes that exchange nothing, from a run of its own."""
    steps = min(config.num_steps, _ALONE_STEPS)
    settings = {"num_steps": steps, "eval_every": steps, "checkpoint_every": steps, "log_every": _ALONE_LOG}
    own = {name: value for name, value in to_dict(config).items() if name != "outer"} | settings
    alone = from_dict(own | {"method": "local", "eval_batches": 1})
    digest = hashlib.sha256(json.dumps(to_dict(alone), sort_keys=True).encode()).hexdigest()[:8]
    return step_seconds(_trained(workdir / f"alone-{digest}", alone, [math.inf] * hosts, 0.0, False))


def train_on_hosts(hosts: Hosts, number: int, config: Path, workdir: Path) -> None:
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
      UserError: as `train_on_hosts` does.
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
