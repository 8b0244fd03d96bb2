"""Train one model on the same tokens in several ways, and compare these in a table and a picture.

    python -m noloco_jax.compare --config=configs/c4_tiny.py --methods=ddp,diloco,noloco,local --seeds=3 --workdir=DIR

A variant is a name, a method and settings. --methods names those of the methods themselves; the configuration is
noloco's, ddp and local take it as it is, and diloco has the paper's settings beside it: outer.lr 0.7, outer.momentum
0.3 without Nesterov, and twice noloco's outer.sync_every. Other methods average as often as noloco and have their own
defaults beside it. --variant="often:outer.fragments=8,outer.wire=int4,outer.sync_every=2" adds another of noloco;
`method=ddp` among its settings makes it one of ddp. `--vary=outer.sync_every=25,50` trains every variant that the field
matters to with each value; several --vary train all combinations, and `--vary=num_replicas/data.batch_size=4/4,8/2`
varies fields together. A gap is above the ddp that has the variant's inner.optimizer and differs in the fewest fields.

`--tune=inner.lr=1e-3,2e-3,4e-3` trains the first seed of each variant, ddp's too, with every value, and its other seeds
with the one of them that ended with the lowest perplexity. More values may be added later.

Each run has a workdir of `python -m noloco_jax.train`, DIR/NAME-seedK, with its output in log.txt. `--jobs=2` trains
two at a time, each on its share of the cores and of the GPUs that CUDA_VISIBLE_DEVICES names (the first one where it
is not set): worth it where one run
does not fill them. The same command resumes; with more variants, seeds or values it adds them. After every run the
results are written to DIR/comparison.md and .png.

`@FILE` stands for the flags that a file holds, as a shell has them, on any number of lines, with `#` comments.

Replicas drift apart between outer steps, and diloco's are equal right after them. With eval_every an odd multiple of
outer.sync_every, noloco is always evaluated right after an outer step and diloco every other time half-way.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from noloco_jax.config import make_parser, split_overrides
from noloco_jax.data import RunData
from noloco_jax.errors import UserError
from noloco_jax.files import check_writable, folder_of_flag, full_disk_told
from noloco_jax.metrics.console import make_console
from noloco_jax.tools.compare.plan import check_folder, make_plan
from noloco_jax.tools.compare.runner import Comparison
from noloco_jax.tools.compare.variants import check_free, make_variants
from noloco_jax.tools.sweep import parse_sweep


def main(argv: Sequence[str] | None = None) -> int:
    """Train the runs that are not finished; return the exit status, 1 where a run broke off."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    overrides, own = split_overrides(with_plans(arguments))
    flags = _parser().parse_args(own)
    if flags.jobs < 1:
        raise UserError(f"--jobs={flags.jobs} is below 1: it is how many runs are trained at a time")
    vary = [parse_sweep(text, "--vary") for text in flags.vary]
    tune = parse_sweep(flags.tune, "--tune") if flags.tune else None
    for choices in [*vary, *([tune] if tune else [])]:
        check_free(choices.fields, "--vary or --tune")
    variants = make_variants(flags.methods, flags.variant, vary)
    plan = make_plan(flags.config, overrides, variants, flags.seeds, vary, tune)
    check_writable(flags.workdir)
    check_folder(flags.workdir, plan.runs)
    configs = [run.config for run in plan.runs]
    for data, replicas, vocabulary in {(c.data, c.num_replicas, c.model.vocab_size) for c in configs}:
        RunData(data, seed=0, vocab_size=vocabulary).check(replicas)

    jax.config.update("jax_platforms", "cpu")  # accelerators are the runs'
    command = shlex.join(["python", "-m", "noloco_jax.compare", *arguments])
    comparison = Comparison(workdir=flags.workdir, plan=plan, jobs=flags.jobs, command=command, console=make_console())
    if flags.dry_run:
        comparison.list_runs()
        return 0
    with full_disk_told(flags.workdir):
        return comparison.run()


def with_plans(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the flags of plan files in the place of `@FILE`.

    Raises:
      UserError: if a file cannot be read, or ends within quotes.
    """
    flags = []
    for argument in arguments:
        try:
            file = Path(argument[1:]) if argument.startswith("@") else None
            flags += [argument] if file is None else shlex.split(file.read_text(encoding="utf-8"), comments=True)
        except (OSError, ValueError) as error:
            raise UserError(f"{argument}: the plan cannot be read ({error}): give a file of flags") from None
    return flags


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__ or "", prog="python -m noloco_jax.compare")
    flag = parser.add_argument
    flag("--config", required=True, metavar="FILE[:ARGUMENT]", help="noloco's; --config.FIELD=VALUE too")
    flag("--methods", help="comma-separated (default: ddp,diloco,noloco,local, none with --variant)")
    help_of_variant = "may be repeated; method=METHOD may be among its fields"
    flag("--variant", action="append", default=[], metavar="NAME:FIELD=VALUE,FIELD=VALUE", help=help_of_variant)
    flag("--seeds", type=int, default=1, metavar="K", help="seeds a variant: config.seed and K-1 more")
    flag("--workdir", required=True, type=folder_of_flag, metavar="DIR", help="where runs and results go")
    help_of_vary = "a field to train with each of several values; may be repeated, for all combinations"
    flag("--vary", action="append", default=[], metavar="FIELD=A,B,C", help=help_of_vary)
    flag("--tune", metavar="FIELD=A,B,C", help="a field of which every variant gets its own best value")
    flag("--jobs", type=int, default=1, metavar="J", help="runs at a time (default 1, right for one GPU)")
    flag("--dry_run", action="store_true", help="check everything, list the runs and stop")
    return parser
