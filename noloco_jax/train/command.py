"""Train a language model on text, with NoLoCo or another method, in one program over all devices.

python -m noloco_jax.train --config=configs/quickstart.py --workdir=DIR
"""

import os
from argparse import ArgumentParser
from collections.abc import Sequence

from noloco_jax.cluster.host import keep_freed_memory
from noloco_jax.cluster.process_rank import define_flags, find_rank
from noloco_jax.config import parse_args
from noloco_jax.files import folder_of_flag


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and train; return the exit status."""
    config, flags = parse_args(argv, __doc__ or "", _define_flags, prog="python -m noloco_jax.train")
    rank = find_rank(flags, os.environ)
    keep_freed_memory()
    from noloco_jax.train.run import train_at  # imported late, so that --help and wrong flags do not wait for jax

    return train_at(
        rank,
        config,
        flags.workdir,
        start_timeout=flags.start_timeout,
        from_step=flags.from_step,
        dry_run=flags.dry_run,
        force_unlock=flags.force_unlock,
        wandb_project=flags.wandb,
    )


def _define_flags(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--workdir",
        required=True,
        type=folder_of_flag,
        metavar="DIR",
        help="the folder for checkpoints, metrics and curves",
    )
    define_run_flags(parser)
    define_flags(parser)


def define_run_flags(parser: ArgumentParser) -> None:
    """Add the flags that `island train` has too: `--from_step`, `--dry_run` and `--wandb`, arguments of `train`."""
    parser.add_argument(
        "--from_step",
        type=int,
        metavar="N",
        help="go back to the checkpoint of step N: later ones are moved to DIR/checkpoints_set_aside, and metrics of "
        "later steps are dropped; given again, the same command resumes from what it has saved since; with islands, "
        "give it to all of them",
    )
    parser.add_argument("--dry_run", action="store_true", help="check everything, print the banner and stop")
    parser.add_argument(
        "--force_unlock",
        action="store_true",
        help="take over the workdir of a trainer on another machine, which you know to have ended",
    )
    parser.add_argument("--wandb", metavar="PROJECT", help="log to this Weights & Biases project as well")
