"""Islands: independent processes, one a replica, that train together over any network.

    python -m noloco_jax.island local 4 --config=configs/quickstart.py --workdir=runs/islands   # all on this machine
    python -m noloco_jax.island keys --roster=roster.toml --out=keys     # an authority, and keys for each island
    python -m noloco_jax.island train --config=configs/c4_125m.py --roster=roster.toml --name=paris --keys=keys/paris
        --workdir=runs/paris
    python -m noloco_jax.island invite --name=oslo --address=oslo.example.org:7070 --keys=keys   # a new member
    python -m noloco_jax.island remove rome --keys=keys
    python -m noloco_jax.island status --roster=roster.toml --keys=keys   # a line for each island
    python -m noloco_jax.island dashboard --roster=roster.toml --keys=keys   # a page to watch them, live
    python -m noloco_jax.island merge --roster=roster.toml --keys=keys --out=merged   # the mean of those that train
    python -m noloco_jax.island merge --workdirs runs/paris runs/rome --out=merged    # of those that have ended

`COMMAND --help` shows a command's flags.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from noloco_jax.cluster.host import keep_freed_memory
from noloco_jax.cluster.process_rank import define_flags, find_rank
from noloco_jax.config import make_parser, parse_args, split_overrides
from noloco_jax.files import folder_of_flag
from noloco_jax.train.command import define_run_flags

_TRAIN = "train as one of the islands"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["train"]:  # takes a configuration's fields as well
        return _train(arguments[1:])
    if arguments[:1] == ["local"]:  # passes on all but its own
        from noloco_jax.islands.local import local

        return local(*_parser().parse_known_args(arguments))
    overrides: Sequence[str] = []
    if arguments[:1] == ["merge"]:  # takes some of them
        overrides, arguments = split_overrides(arguments)
    flags = _parser().parse_args(arguments, argparse.Namespace(overrides=overrides))
    if flags.command in ("keys", "invite", "remove"):
        from noloco_jax.islands import members as commands
    elif flags.command == "status":
        from noloco_jax.islands import status as commands
    elif flags.command == "dashboard":
        from noloco_jax.islands import dashboard as commands
    else:
        from noloco_jax.islands import merge as commands  # imports jax, which takes seconds that others need not spend
    return getattr(commands, flags.command)(flags)


def _train(argv: Sequence[str]) -> int:
    config, flags = parse_args(argv, _TRAIN, _define_train_flags, prog="python -m noloco_jax.island train")
    rank = find_rank(flags, os.environ)
    keep_freed_memory()
    from noloco_jax.islands.run import train_island  # imports numpy and jax, which must follow the call above

    return train_island(config, rank, flags)


def _define_train_flags(parser: argparse.ArgumentParser) -> None:
    _define_roster(parser)
    parser.add_argument("--name", required=True, metavar="NAME", help="which of the roster's islands this is")
    _define_folder(parser, "--keys", "the island's keys; none are needed where all are loopback", required=False)
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="the address of this machine to listen at, where a router forwards another one (default: the port that "
        "the others dial, at all of the machine's addresses)",
    )
    _define_folder(parser, "--workdir", "the island's own folder")
    define_run_flags(parser)
    parser.add_argument(
        "--pace",
        choices=("steps", "time"),
        default="steps",
        help="steps: every island takes every inner step; time: each takes as many of a round's as it has time for, "
        "while the fastest takes all, and messages weigh accordingly; the same on all islands (default: steps)",
    )
    parser.add_argument(
        "--linger",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="after the last step, serve the weights to `island merge` until all islands have taken it, at most this "
        "long, or twice as long while they are fetched; 0: leave at once (default %(default)s)",
    )
    define_flags(parser)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__ or "", prog="python -m noloco_jax.island")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    commands.add_parser("train", help=_TRAIN, add_help=False)  # read by `_train`
    local = _command(commands, "local", "train all islands on this machine; further arguments are those of train")
    local.add_argument("number", type=int, metavar="N", help="of islands, 2 or more")
    _define_folder(local, "--workdir", "a folder for all of them")
    keys = _command(commands, "keys", "make a certificate authority, and keys for each island that has none")
    _define_roster(keys)
    _define_folder(keys, "--out", "where they go, a folder each")
    replacing = "make this island's anew, and revoke the old ones; may be repeated"
    keys.add_argument("--replace", action="append", default=[], metavar="NAME", help=replacing)
    inviting = _command(commands, "invite", "make keys and a signed row for a new member, or move a member")
    inviting.add_argument("--name", required=True, metavar="NAME", help="its name, a DNS label")
    address = "where the others reach it; none: it only dials out"
    inviting.add_argument("--address", required=True, metavar="HOST:PORT", help=address)
    _define_authority(inviting, "its first round, as in the log (default: far enough ahead for all to know)")
    removing = _command(commands, "remove", "end a membership")
    removing.add_argument("name", metavar="NAME", help="the member")
    _define_authority(removing, "the first round without it, as in the log (default: as for invite)")
    for one in (keys, inviting):
        one.add_argument("--days", type=int, default=90, help="for which certificates are valid (default %(default)s)")
    status = _command(commands, "status", "show the status of all islands")
    _define_watching(status)
    status.add_argument("--seconds", type=float, default=10.0, help="to wait for each (default %(default)s)")
    status.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C")
    dashboard = _command(commands, "dashboard", "serve a page of all islands on this machine, and metrics of them")
    _define_watching(dashboard)
    there = "where the page is; port 0 takes any that is free (default %(default)s, for this machine alone)"
    dashboard.add_argument("--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help=there)
    every = "interval of asking (default %(default)s)"
    dashboard.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help=every)
    _define_merge(_command(commands, "merge", "write the mean of islands' weights as a model's folder"))
    return parser


def _command(commands, name: str, help: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
    parser.set_defaults(command=name)
    return parser


def _define_merge(parser: argparse.ArgumentParser) -> None:
    _define_watching(parser, required=False)
    ended = "folders of islands that have ended"
    parser.add_argument("--workdirs", nargs="+", type=folder_of_flag, metavar="DIR", help=ended)
    _define_folder(parser, "--out", "the folder to write, new or empty")
    fewest = "refuse a mean of fewer islands (default %(default)s)"
    parser.add_argument("--at_least", type=int, default=1, metavar="K", help=fewest)
    parser.add_argument(
        "--without",
        action="extend",
        default=[],
        type=lambda names: names.split(","),
        metavar="NAME",
        help="leave islands out, by name or, of --workdirs, by the folder's: a list, or repeated",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=600.0,
        help="to wait for each one's weights, and as long again for those that will have come by then at their speed "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--evaluate",
        action="store_true",
        help="print its validation perplexity too, computed on this machine's accelerators if it has some, with the "
        "data at the islands' path, or at another --config.data.path",
    )


def _define_authority(parser: argparse.ArgumentParser, round: str) -> None:
    _define_folder(parser, "--keys", "the folder that `island keys` made, whole")
    parser.add_argument("--from_round", "--from-round", type=int, metavar="N", help=round)


def _define_watching(parser: argparse.ArgumentParser, required: bool = True) -> None:
    _define_roster(parser, required)
    _define_folder(parser, "--keys", "the folder that `island keys` made, or one island's own", required=False)


def _define_roster(parser: argparse.ArgumentParser, required: bool = True) -> None:
    file = "the run's islands: the TOML file that it began with, or the members.json of an invited member"
    parser.add_argument("--roster", required=required, type=folder_of_flag, metavar="FILE", help=file)


def _define_folder(parser: argparse.ArgumentParser, flag: str, help: str, required: bool = True) -> None:
    parser.add_argument(flag, required=required, type=folder_of_flag, metavar="DIR", help=help)
