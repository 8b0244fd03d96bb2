"""Flags that `train` and `island train` share, independent of where the replicas are."""

from argparse import ArgumentParser


def define_run_flags(parser: ArgumentParser) -> None:
    """Add `--from_step`, `--dry_run` and `--wandb`, which are keyword arguments of `training.train`."""
    parser.add_argument(
        "--from_step",
        type=int,
        metavar="N",
        help="go back to the checkpoint of step N: later ones are moved to DIR/checkpoints_set_aside, and metrics of "
        "later steps are dropped; given again, the same command resumes from what it has saved since; with islands, "
        "give it to all of them",
    )
    parser.add_argument("--dry_run", action="store_true", help="check everything, print the banner and stop")
    parser.add_argument("--wandb", metavar="PROJECT", help="log to this Weights & Biases project as well")
