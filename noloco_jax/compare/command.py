"""Trains the same model on the same tokens with several methods, and compares them in a table and a picture.

    python -m noloco_jax.compare --config=configs/c4_tiny.py --methods=ddp,diloco,noloco,local --seeds=3 --workdir=DIR

The configuration is noloco's. ddp and local take it as it is; diloco has the paper's settings beside it: outer.lr 0.7,
outer.momentum 0.3 and twice noloco's outer.sync_every. `--set=diloco:outer.sync_every=50` sets a field of one method,
over all else, and `--vary=outer.sync_every=25,50,100` trains every method that the field matters to with each value.

Runs go one after another, each in DIR/METHOD[-FIELD=VALUE]-seedK, a workdir of `python -m noloco_jax.train`. The same
command again goes on where it was stopped; with more methods, seeds or values it adds them. What is finished stands in
DIR/comparison.md, .csv and .png after every run. Once a run is finished, its checkpoints are no longer needed.

Replicas drift apart between outer steps, and diloco's are equal right after them. With eval_every an odd multiple of
outer.sync_every, noloco is always evaluated right after an outer step and diloco every other time half-way.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence

import jax

from noloco_jax.compare.plan import check_folder, make_plan, parse_methods, parse_settings, parse_vary
from noloco_jax.compare.runner import Comparison
from noloco_jax.config import make_parser, split_overrides
from noloco_jax.data import check_data
from noloco_jax.files import check_writable, folder_of_flag
from noloco_jax.run.console import make_console


def main(argv: Sequence[str] | None = None) -> int:
    """Trains what is not finished yet; returns the exit status, 1 where a run broke off."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    overrides, own = split_overrides(arguments)
    flags = _parser().parse_args(own)
    methods = parse_methods(flags.methods)
    vary = parse_vary(flags.vary) if flags.vary else None
    runs = make_plan(flags.config, overrides, methods, flags.seeds, vary, parse_settings(flags.set, methods))
    check_writable(flags.workdir)
    check_folder(flags.workdir, runs)
    for data, replicas, vocabulary in {(r.config.data, r.config.num_replicas, r.config.model.vocab_size) for r in runs}:
        check_data(data, num_replicas=replicas, vocab_size=vocabulary)

    jax.config.update("jax_platforms", "cpu")  # accelerators are the runs'
    comparison = Comparison(
        config_file=flags.config,
        workdir=flags.workdir,
        runs=runs,
        vary=vary.field if vary else None,
        command=shlex.join(["python", "-m", "noloco_jax.compare", *arguments]),
        console=make_console(),
    )
    if flags.dry_run:
        comparison.list_runs()
        return 0
    return comparison.run()


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__ or "", prog="python -m noloco_jax.compare")
    parser.add_argument("--config", required=True, metavar="FILE[:ARGUMENT]", help="noloco's; --config.FIELD=VALUE too")
    parser.add_argument("--methods", default="ddp,diloco,noloco,local", help="comma-separated (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, metavar="K", help="seeds a method: config.seed and K-1 more")
    parser.add_argument(
        "--workdir", required=True, type=folder_of_flag, metavar="DIR", help="where runs and results go"
    )
    parser.add_argument("--vary", metavar="FIELD=A,B,C", help="a field to train with each of several values")
    parser.add_argument("--set", action="append", default=[], metavar="METHOD:FIELD=VALUE", help="may be repeated")
    parser.add_argument("--dry_run", action="store_true", help="check everything, list the runs and stop")
    return parser
