"""Find a setting that fits your links, and what each method costs on them.

    python -m noloco_jax.simulate --params=1.3B --bandwidth=1Gbit --latency=40ms --step_time=2s --replicas=16
    python -m noloco_jax.simulate --config=configs/c4_1b.py --bandwidth=100Mbit --step_time=2s --islands
    python -m noloco_jax.simulate --params=1.3B --fragments=8 --wire=int8 --sync_every=25

--config takes parameters, method, replicas and the settings of `outer` from a config file, and
--config.FIELD=VALUE changes it; the flags below win over both. Prints Markdown.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from noloco_jax.config import load_config, make_parser, split_overrides
from noloco_jax.errors import UserError
from noloco_jax.tools.simulate.cost import Setting
from noloco_jax.tools.simulate.report import report


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
    config = load_config(file, overrides)
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
    unset = argparse.SUPPRESS  # leaves the value to the config file or to `Setting`
    for field in dataclasses.fields(Setting):
        if flag := field.metadata:
            parser.add_argument(f"--{field.name}", type=flag["parse"], default=unset, metavar="X", help=flag["help"])
    help_of_islands = "the replicas are islands, which never wait"
    parser.add_argument("--islands", action="store_true", default=unset, help=help_of_islands)
    return parser
