"""Show the communication of a run: every collective of its compiled programs, the axes it crosses, and its bytes.

    python -m noloco_jax.communication --config=configs/quickstart.py --devices=8
    python -m noloco_jax.communication --config=configs/c4_125m.py --config.mesh.fsdp=2 --devices=8 --json

Compiles what a training run would, for the same devices or for `--devices` forced CPU devices, without data and without
allocating any of its arrays. Exit status: 0; 2 for bad input; with --check, 1 if a program crosses replicas where its
method promises that it does not.
"""

import argparse
import json
import sys
from collections.abc import Sequence

import jax

from noloco_jax.cluster.host import use_cpu_cores
from noloco_jax.communication.promises import broken_promises
from noloco_jax.communication.report import inspect_run
from noloco_jax.communication.table import show, to_json
from noloco_jax.config import parse_args
from noloco_jax.errors import UserError
from noloco_jax.methods import has_delay
from noloco_jax.metrics.console import make_console
from noloco_jax.spmd.background import training_devices


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and print the report; return the exit status."""
    config, flags = parse_args(argv, __doc__ or "", _define_flags, prog="python -m noloco_jax.communication")
    if flags.devices is None:
        use_cpu_cores(config)
    elif flags.devices < 1:
        raise UserError(f"--devices={flags.devices} is no number of devices: give 1 or more")
    else:
        jax.config.update("jax_platforms", "cpu")
        exchanging = has_delay(config) and flags.devices > 1  # on as many more
        jax.config.update("jax_num_cpu_devices", (1 + exchanging) * flags.devices)
    devices = training_devices(config, jax.devices())
    if flags.processes < 1 or len(devices) % flags.processes:
        raise UserError(f"--processes={flags.processes} cannot share {len(devices)} devices evenly: give a divisor")
    report = inspect_run(config, devices, num_processes=flags.processes)
    if flags.json:
        json.dump(to_json(report), sys.stdout, indent=1)
        print()
    else:
        show(report, make_console())
    return 1 if flags.check and broken_promises(report) else 0


def _define_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, metavar="N", help="compile for N forced CPU devices")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="as for a run of N processes that share the devices evenly",
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a promise of the method is broken")
