"""The paper's analysis in numbers and pictures, and what each method would cost on your own links.

    python -m noloco_jax.simulate --params=1.3B --bandwidth=1Gbit --latency=40ms --step-time=2s --replicas=16
    python -m noloco_jax.simulate --only=cost --params=1.3B --fragments=8 --wire=int6 --delay=3
    python -m noloco_jax.simulate --out=DIR

Prints Markdown; `--out` also writes it and the pictures to DIR. The whole takes about ten seconds.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from noloco_jax.config import make_parser
from noloco_jax.errors import UserError
from noloco_jax.files import check_writable, folder_of_flag, write_whole
from noloco_jax.formatting import (
    format_bandwidth,
    format_count,
    format_seconds,
    parse_bandwidth,
    parse_count,
    parse_percent,
    parse_seconds,
)
from noloco_jax.simulate import sections
from noloco_jax.simulate.cost import ALL_REDUCES, Setting
from noloco_jax.simulate.cost_section import cost_section
from noloco_jax.wires import WIRES

REPORT = "simulate.md"
_PICTURES = {
    "cost": ["cost.png", "exposed.png"],
    "latency": ["latency.png"],
    "blocking": ["blocking.png"],
    "theory": ["quadratic.png", "stability.png"],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the chosen sections, one as soon as it is done."""
    args = vars(_parser().parse_args(argv))
    out, seed, chosen, below = (args.pop(name) for name in ("out", "seed", "only", "exposed_below"))
    setting = Setting(**args)
    setting.check()
    if seed < 0:
        raise UserError(f"--seed={seed} is below 0: raise it")
    chosen = _sections(chosen)
    if out:
        _claim(out, [REPORT, *(name for section in chosen for name in _PICTURES[section])])
    compute: dict[str, Callable[[], str]] = {
        "cost": lambda: cost_section(setting, below, seed, out),
        "latency": lambda: sections.latency_section(seed, out),
        "blocking": lambda: sections.blocking_section(seed, out),
        "theory": lambda: sections.theory_section(seed, out),
    }
    report = []
    for section in chosen:
        text = compute[section]()
        print(text, end="\n\n", flush=True)
        report += [text, *(f"![{section}]({name})" for name in _PICTURES[section])]
    if out:
        write_whole(out / REPORT, "\n\n".join(report) + "\n")
        print(f"written: {out / REPORT} and its pictures", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__ or "", prog="python -m noloco_jax.simulate")
    parser.add_argument(
        "--out", type=folder_of_flag, help="folder for the report and the pictures; nothing there is overwritten"
    )
    parser.add_argument("--only", help=f"sections to compute, separated by commas: {','.join(_PICTURES)}")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default %(default)s)")
    parser.add_argument(
        "--exposed-below",
        type=lambda s: parse_percent(s, "--exposed-below"),
        default=0.05,
        metavar="X",
        help="percent of the time that links may cost; what keeps below it is looked for (default 5%%)",
    )
    links = parser.add_argument_group("your model and links")
    links_default = Setting()

    def flag(name: str, parse: Callable[[str], object], meaning: str, default: object) -> None:
        # SUPPRESS: a flag that is not given leaves the default to Setting.
        links.add_argument(
            f"--{name}", type=parse, default=argparse.SUPPRESS, metavar="X", help=f"{meaning} (default {default})"
        )

    flag("params", lambda s: parse_count(s, "--params"), "parameters: 125M, 1.3B", format_count(links_default.params))
    flag(
        "bandwidth",
        lambda s: parse_bandwidth(s, "--bandwidth"),
        "of a replica's link, each way: 100Mbit, 1GB/s",
        format_bandwidth(links_default.bandwidth),
    )
    flag(
        "latency",
        lambda s: parse_seconds(s, "--latency", zero=True),
        "of a message, one way: 40ms",
        format_seconds(links_default.latency),
    )
    flag(
        "step-time",
        lambda s: parse_seconds(s, "--step-time"),
        "computing time of a step: 1.2s",
        format_seconds(links_default.step_time),
    )
    flag("replicas", int, "number of replicas; for FSDP, of shards", links_default.replicas)
    flag("sync-every", int, "inner steps between outer steps", links_default.sync_every)
    flag("group-size", int, "replicas that average together in NoLoCo", links_default.group_size)
    flag("steps", int, "inner steps of the run", links_default.steps)
    flag("fragments", int, "equal parts of the parameters that DiLoCo and NoLoCo send in turn", links_default.fragments)
    flag(
        "wire",
        str,
        f"form of messages: {', '.join(WIRES)}; where that is a code, all but NoLoCo send float32",
        links_default.wire,
    )
    flag("delay", int, "inner steps beside which DiLoCo and NoLoCo exchange", links_default.delay)
    flag("all-reduce", str, f"algorithm of DiLoCo and DDP: {', '.join(ALL_REDUCES)}", links_default.all_reduce)
    flag("step-spread", float, "standard deviation over mean of a step's time", f"{links_default.step_spread:g}")
    return parser


def _sections(only: str | None) -> list[str]:
    chosen = only.split(",") if only else list(_PICTURES)
    for name in chosen:
        if name not in _PICTURES:
            raise UserError(f"--only={only}: there is no section {name!r}, choose from {', '.join(_PICTURES)}")
    return chosen


def _claim(out: Path, names: Sequence[str]) -> None:
    """Makes the folder, unless that or writing these files would destroy something."""
    check_writable(out)
    for name in names:
        if (out / name).exists():
            raise UserError(f"--out={out} already holds {name}: name another folder, or remove that file")
    out.mkdir(parents=True, exist_ok=True)
