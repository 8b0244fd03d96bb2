"""Find a setting that fits your links, and what each method costs on them.

    python -m noloco_jax.simulate --params=1.3B --bandwidth=1Gbit --latency=40ms --step_time=2s --replicas=16
    python -m noloco_jax.simulate --config=configs/c4_1b.py --bandwidth=100Mbit --step_time=2s --islands
    python -m noloco_jax.simulate --params=1.3B --fragments=8 --wire=int8 --sync_every=25

--config takes parameters, method, replicas and the settings of `outer` from a config file, and
--config.FIELD=VALUE changes it; the flags below win over both. Prints Markdown.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from noloco_jax.config import from_dict, load_config, make_parser, split_overrides
from noloco_jax.errors import UserError
from noloco_jax.formatting import (
    format_bandwidth,
    format_count,
    format_seconds,
    parse_bandwidth,
    parse_count,
    parse_seconds,
)
from noloco_jax.simulate.cost import OUTER_METHODS, Setting
from noloco_jax.simulate.report import report
from noloco_jax.wires import WIRES


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report."""
    overrides, own = split_overrides(sys.argv[1:] if argv is None else argv)
    flags = vars(_parser().parse_args(own))
    file = flags.pop("config")
    if overrides and file is None:
        raise UserError(f"{overrides[0]} changes a config file: give it by --config=FILE")
    setting = Setting(**((_settings_of(file, overrides) if file else {}) | flags))
    setting.check()
    sys.stdout.write(report(setting) + "\n")  # in one piece, so that `| head` does not end the program in the middle
    return 0


def _settings_of(file: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the fields of `Setting` that a configuration has."""
    config = from_dict(load_config(file, overrides))
    from noloco_jax.model.kind import num_params  # imports jax

    settings = {
        "params": float(num_params(config.model)[0]),
        "method": config.method,
        "replicas": config.num_replicas,
        "steps": config.num_steps,
    }
    outer = {
        name: getattr(config.outer, name) for name in ("sync_every", "group_size", "fragments", "wire", "delay")
    }  # None where the method has no such field
    return settings | {name: value for name, value in outer.items() if value is not None}


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__ or "", prog="python -m noloco_jax.simulate")
    parser.add_argument("--config", metavar="FILE[:ARGUMENT]", help="a run's config file; --config.FIELD=VALUE too")
    default = Setting()

    def flag(name: str, parse: Callable[[str], object], meaning: str, default: object) -> None:
        # With SUPPRESS a flag that is not given leaves the value to the config file or to Setting.
        parser.add_argument(
            f"--{name}", type=parse, default=argparse.SUPPRESS, metavar="X", help=f"{meaning} (default {default})"
        )

    flag("params", lambda s: parse_count(s, "--params"), "parameters: 125M, 1.3B", format_count(default.params))
    flag(
        "bandwidth",
        lambda s: parse_bandwidth(s, "--bandwidth"),
        "of a replica's link, each way: 100Mbit, 1GB/s",
        format_bandwidth(default.bandwidth),
    )
    flag(
        "latency",
        lambda s: parse_seconds(s, "--latency", zero=True),
        "of a message, one way: 40ms",
        format_seconds(default.latency),
    )
    flag(
        "step_time",
        lambda s: parse_seconds(s, "--step_time"),
        "computing time of a step, as bench measures it: 1.2s",
        format_seconds(default.step_time),
    )
    flag("method", str, f"method to find a setting for: {' or '.join(OUTER_METHODS)}", default.method)
    flag("replicas", int, "number of replicas; for FSDP, of shards", default.replicas)
    flag("sync_every", int, "inner steps between outer steps", default.sync_every)
    flag("group_size", int, "replicas that average together in NoLoCo", default.group_size)
    flag("steps", int, "inner steps of the run", default.steps)
    flag("fragments", int, "equal parts of the parameters that DiLoCo and NoLoCo send in turn", default.fragments)
    flag("wire", str, f"wire format of NoLoCo's messages: {', '.join(WIRES)}", default.wire)
    flag("delay", int, "inner steps beside which DiLoCo and NoLoCo exchange", default.delay)
    parser.add_argument(
        "--islands", action="store_true", default=argparse.SUPPRESS, help="the replicas are islands, which never wait"
    )
    return parser
