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
from dataclasses import replace
from typing import Any

from noloco_jax.config import load_config, make_parser, split_overrides
from noloco_jax.errors import UserError
from noloco_jax.formatting import (
    format_bandwidth,
    format_bytes,
    format_count,
    format_percent,
    format_seconds,
    markdown_table,
)
from noloco_jax.tools import cost
from noloco_jax.tools.cost import Setting

LEVELS = 10  # of the largest tree: 1,024 replicas
_TREES = 2000
_MODEL = (
    "Links are alike and full duplex; an exchange does not slow computing down; every step takes the same time. Each "
    "step of a collective takes a round trip, two latencies. All-reduces are rings; DiLoCo's have int4 in the place of "
    "modulo4. A pair swaps by a sum of two steps, or half duplex in one, whichever is faster. FSDP gathers twice and "
    "reduces once a step, beside the whole step; DDP's all-reduce follows the step."
)
_ISLANDS = (
    f" An exchange between islands takes {cost.ISLAND_HOPS} latencies. *completed*: the share of exchanges that the "
    "link has time for."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report."""
    overrides, own = split_overrides(sys.argv[1:] if argv is None else argv)
    flags = vars(_parser().parse_args(own))
    file = flags.pop("config")
    if overrides and file is None:
        raise UserError(f"{overrides[0]} changes a config file: give it by --config=FILE")
    setting = Setting(**((_settings_of(file, overrides) if file else {}) | flags))
    setting.check()
    # In one piece, so that `| head` does not end the program in the middle.
    sys.stdout.write(simulation_report(setting) + "\n")
    return 0


def _settings_of(file: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the fields of `Setting` that a configuration has."""
    config = load_config(file, overrides)
    from noloco_jax.model.architecture import num_params  # imports jax

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


def simulation_report(setting: cost.Setting) -> str:
    """Return the answer, then tables of the wire formats, the methods and the numbers of replicas, as Markdown."""
    where = "islands" if setting.islands else "replicas"
    message = format_bytes(4 * setting.params / setting.fragments)
    return "\n\n".join(
        [
            f"{format_count(setting.params)} parameters, {setting.replicas} {where}, "
            f"{format_bandwidth(setting.bandwidth)} each way, {format_seconds(setting.latency)} latency, "
            f"{format_seconds(setting.step_time)} of computing a step.",
            fit_sentence(setting),
            f"NoLoCo {schedule(setting)}, by wire format:",
            _wires(setting),
            f"Methods, DiLoCo and NoLoCo {schedule(setting)}; bytes are those that one replica sends, in "
            f"{setting.steps} steps in all:",
            _method_table(setting),
            f"One averaging of {message} in float32, by the number of replicas:",
            _latencies(setting),
            "*tree / pair* is the paper's comparison, in which a pair is a tree of two: log₂ N where all messages take "
            "the same time, more where their times vary (log-normal, with a standard deviation as large as the mean). "
            "A pair of NoLoCo sends both ways at once, which halves its time again.",
            _MODEL + (_ISLANDS if setting.islands else ""),
        ]
    )


def fit_sentence(setting: cost.Setting) -> str:
    """Return a sentence on whether the exchange fits between two of them, and the trainer's flags for it."""
    own, fits = cost.cost_of(setting, setting.method), cost.fitting(setting)
    takes = f"an exchange takes {format_seconds(own.seconds_per_sync)}"
    if (fits.wire, fits.sync_every) == (setting.wire, setting.sync_every):
        exposed = cost.cost_of(replace(setting, delay=0), setting.method)
        text = f"This setting fits the link: {takes}, and " + (
            _lag(fits)
            if setting.islands
            else f"outer.delay={fits.delay} is the smallest delay that hides it (without a delay, "
            f"{format_percent(1 - exposed.compute_share)} of the time is exposed)"
        )
    else:
        text = (
            f"This setting does not fit the link: {takes}, and the {own.every:.3g} steps to the next one take "
            f"{format_seconds(own.every * setting.step_time)}. The nearest that fits, "
            + (f"in which {_lag(fits)}" if setting.islands else "with the smallest delay that hides its exchange")
        )
    names = ["sync_every", "fragments", "wire"]
    names += ["group_size"] if setting.method == "noloco" and setting.group_size > 2 else []
    names += [] if setting.islands else ["delay"]
    flags = [f"--config.outer.{name}={getattr(fits, name)}" for name in names]
    return f"{text}:\n\n    --config.method={setting.method} {' '.join(flags)}"


def _lag(setting: cost.Setting) -> str:
    steps = cost.smallest_delay(setting, setting.method)
    return f"corrections arrive {steps} step{'' if steps == 1 else 's'} late"


def schedule(setting: cost.Setting) -> str:
    """Describe when outer steps happen."""
    each = f" with each of {setting.fragments} fragments" if setting.fragments > 1 else ""
    every = f"every {setting.sync_every} steps" if setting.sync_every > 1 else "every step"
    return every + each + (f", delay {setting.delay}" if setting.delay else "")


def _wires(setting: cost.Setting) -> str:
    rows = []
    for wire in cost.wires_for(by_swaps=setting.by_swaps):
        own = replace(setting, wire=wire)
        c = cost.cost_of(own, "noloco")
        rows.append(
            [
                wire,
                format_bytes(c.bytes_per_sync),
                format_seconds(c.seconds_per_sync),
                format_percent(completed_share(own) if setting.islands else 1 - c.compute_share),
                _or_none(cost.smallest_delay(own, "noloco")),
                str(cost.shortest_interval(own, "noloco")),
            ]
        )
    own = ["completed", "steps late"] if setting.islands else ["exposed", "smallest delay that hides it"]
    return markdown_table(["wire", "sent each time", "link time", *own, "shortest sync_every that fits"], rows)


def _method_table(setting: cost.Setting) -> str:
    rows = []
    for method, title in cost.METHOD_TITLES.items():
        c = cost.cost_of(setting, method)
        rows.append(
            [
                title,
                f"{c.every:.3g} step{'' if c.every == 1 else 's'}",
                format_bytes(c.bytes_per_sync / c.every),
                format_bytes(c.bytes_in_all),
                format_seconds(c.seconds_per_sync),
                format_seconds(c.exposed_per_step),
                format_percent(c.compute_share),
            ]
        )
    header = ["method", "every", "sent a step", "sent in all", "link time", "exposed a step", "time computing"]
    return markdown_table(header, rows)


def _latencies(setting: cost.Setting) -> str:
    varying = cost.tree_over_pair(1.0, LEVELS, _TREES)
    rows = []
    for level in range(LEVELS):
        n = 2 ** (level + 1)
        times = [format_seconds(seconds) for seconds in cost.latencies_of(setting, n)]
        rows.append([f"{n:,}", *times, str(level + 1), f"{varying[level]:.1f}"])
    header = ["replicas", "pair", "all-reduce", "tree", "tree / pair", "with varying times"]
    return markdown_table(header, rows)


def completed_share(setting: cost.Setting) -> float:
    """Return the share of an island's exchanges that the link has time for.

    Latency costs none, as the next exchange begins meanwhile.
    """
    c = cost.cost_of(setting, "noloco")
    return min(c.every * setting.step_time * setting.bandwidth / (8 * c.bytes_per_sync), 1.0)


def _or_none(steps: int | None) -> str:
    return "none" if steps is None else str(steps)
