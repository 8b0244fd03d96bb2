"""Find a setting that fits your links: the smallest delay that hides an exchange, and the cost of each method.

    python -m noloco_jax.simulate --params=1.3B --bandwidth=1Gbit --latency=40ms --step-time=2s --replicas=16
    python -m noloco_jax.simulate --params=1.3B --fragments=8 --wire=int6 --sync-every=25
    python -m noloco_jax.simulate --analysis --out=DIR

Prints Markdown; `--out` also writes it and pictures to DIR. `--analysis` adds the paper's analysis in numbers (latency,
blocking, the theorem on a quadratic loss), which takes ten seconds more.
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
    parse_seconds,
)
from noloco_jax.simulate import analysis, pictures
from noloco_jax.simulate.cost import Setting
from noloco_jax.simulate.report import report
from noloco_jax.wires import WIRES

REPORT = "simulate.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report, and each section of the analysis as soon as it is done."""
    args = vars(_parser().parse_args(argv))
    out, with_analysis = args.pop("out"), args.pop("analysis")
    setting = Setting(**args)
    setting.check()
    sections: list[tuple[Callable[[Path | None], str], tuple[str, ...]]] = [(lambda _: report(setting), ())]
    if with_analysis:
        sections += analysis.SECTIONS
    costs = ("cost.png", "exposed.png")
    if out:
        _claim(out, [REPORT, *costs, *(name for _, names in sections for name in names)])
    texts = []
    for section, names in sections:
        text = section(out)
        print(text, end="\n\n", flush=True)
        texts += [text, *(f"![{name.removesuffix('.png')}]({name})" for name in (names or costs))]
    if out:
        pictures.costs(setting, out / costs[0])
        pictures.exposed(setting, out / costs[1])
        write_whole(out / REPORT, "\n\n".join(texts) + "\n")
        print(f"written: {out / REPORT} and its pictures", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__ or "", prog="python -m noloco_jax.simulate")
    parser.add_argument(
        "--out", type=folder_of_flag, help="folder for the report and the pictures; nothing there is overwritten"
    )
    parser.add_argument("--analysis", action="store_true", help="add the paper's analysis in numbers")
    links = parser.add_argument_group("your model and links")
    default = Setting()

    def flag(name: str, parse: Callable[[str], object], meaning: str, default: object) -> None:
        # With SUPPRESS a flag that is not given leaves the default to Setting.
        links.add_argument(
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
        "step-time",
        lambda s: parse_seconds(s, "--step-time"),
        "computing time of a step: 1.2s",
        format_seconds(default.step_time),
    )
    flag("replicas", int, "number of replicas; for FSDP, of shards", default.replicas)
    flag("sync-every", int, "inner steps between outer steps", default.sync_every)
    flag("group-size", int, "replicas that average together in NoLoCo", default.group_size)
    flag("steps", int, "inner steps of the run", default.steps)
    flag("fragments", int, "equal parts of the parameters that DiLoCo and NoLoCo send in turn", default.fragments)
    flag("wire", str, f"wire format of NoLoCo's messages: {', '.join(WIRES)}", default.wire)
    flag("delay", int, "inner steps beside which DiLoCo and NoLoCo exchange", default.delay)
    flag("step-spread", float, "standard deviation over mean of a step's time", f"{default.step_spread:g}")
    return parser


def _claim(out: Path, names: Sequence[str]) -> None:
    """Create the folder; raise UserError if writing these files there would destroy something."""
    check_writable(out)
    for name in names:
        if (out / name).exists():
            raise UserError(f"--out={out} already holds {name}: name another folder, or remove that file")
    out.mkdir(parents=True, exist_ok=True)
