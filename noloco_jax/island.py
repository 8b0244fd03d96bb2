"""Islands: independent processes, one a replica, that train together over any network.

    python -m noloco_jax.island keys --roster=roster.toml --out=keys     # an authority, and keys for each island
    python -m noloco_jax.island train --config=configs/c4_125m.py --roster=roster.toml --name=paris --keys=keys/paris
        --workdir=runs/paris
    python -m noloco_jax.island status --roster=roster.toml --keys=keys   # a line for each island
    python -m noloco_jax.island merge --roster=roster.toml --keys=keys --out=merged   # the mean of those that train
    python -m noloco_jax.island merge --workdirs runs/paris runs/rome --out=merged    # of those that have ended
    python -m noloco_jax.island report --workdirs runs/paris runs/rome --out=islands.png
    python -m noloco_jax.island gather --workdirs runs/paris runs/rome --out=runs/together   # one program goes on
    python -m noloco_jax.island scatter --workdir=runs/together --roster=roster.toml --out=runs   # islands go on

`COMMAND --help` shows a command's flags.
"""

import argparse
import sys
from collections.abc import Sequence

import jax

from noloco_jax.cluster.host import keep_freed_memory, use_cpu_cores, use_gpu_memory
from noloco_jax.config import load_saved, make_parser, overridden, parse_args, split_overrides
from noloco_jax.errors import UserError, main_with_errors
from noloco_jax.files import check_writable, folder_of_flag, full_disk_told
from noloco_jax.formatting import format_perplexity
from noloco_jax.islands.keys import AUTHORITY_KEY, credentials_for, make_keys
from noloco_jax.islands.look import ask_all, clients_of
from noloco_jax.islands.roster import read_roster
from noloco_jax.model.huggingface import check_new_folder
from noloco_jax.run.console import make_console
from noloco_jax.run.island import Membership
from noloco_jax.run.island_folders import gather, scatter
from noloco_jax.run.island_merge import mean_of, of_folders, of_live_islands, perplexity_of
from noloco_jax.run.island_picture import draw_islands
from noloco_jax.run.island_table import report_table, row_of, status_table
from noloco_jax.run.model_folder import tokenizer_of, write_model_folder
from noloco_jax.train.training import train

_TRAIN = "train as one of the islands"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["train"]:  # which takes a configuration's fields as well
        return _train(arguments[1:])
    if arguments[:1] == ["merge"]:  # which takes some of them
        overrides, arguments = split_overrides(arguments)
        return _merge(_parser().parse_args(arguments), overrides)
    if arguments[:1] == ["scatter"]:  # likewise
        overrides, arguments = split_overrides(arguments)
        return _scatter(_parser().parse_args(arguments), overrides)
    flags = _parser().parse_args(arguments)
    return flags.run(flags)


def _train(argv: Sequence[str]) -> int:
    """Trains as one of the islands; what is wrong is told before anything is compiled."""
    config, flags = parse_args(argv, _TRAIN, _define_train_flags, prog="python -m noloco_jax.island train")
    roster = read_roster(flags.roster)
    credentials = credentials_for(roster, flags.name, flags.keys)
    member = Membership(roster, flags.name, credentials, pace=flags.pace, at_once=flags.at_once)
    member.check(config)
    keep_freed_memory()
    use_gpu_memory()
    with full_disk_told(flags.workdir):
        use_cpu_cores(member.own(config))
        return train(config, flags.workdir, member=member)


def _define_train_flags(parser: argparse.ArgumentParser) -> None:
    _define_roster_flag(parser)
    parser.add_argument("--name", required=True, metavar="NAME", help="which of the roster's islands this is")
    parser.add_argument(
        "--keys", type=folder_of_flag, metavar="DIR", help="the island's keys; none are needed where all are loopback"
    )
    parser.add_argument("--workdir", required=True, type=folder_of_flag, metavar="DIR", help="the island's own folder")
    parser.add_argument(
        "--pace",
        choices=("steps", "time"),
        default=Membership.pace,
        help="steps: every island takes every inner step; time: each takes as many of a round's as it has time for, "
        "while the fastest takes all, and messages weigh accordingly; the same on all islands (default %(default)s)",
    )
    parser.add_argument(
        "--at_once",
        action="store_true",
        help="wait for every exchange, as replicas of one program do: to compare with one, not to train",
    )


def _keys(flags: argparse.Namespace) -> int:
    """Makes the keys that are missing, and says what to do with them."""
    if not 1 <= flags.days <= 3650:
        raise UserError(f"--days={flags.days}: give 1 to 3650, the days that the authority itself is valid")
    roster = read_roster(flags.roster)
    check_writable(flags.out)
    made = make_keys(roster, flags.out, flags.days, flags.replace)
    kept = [name for name in roster.names if name not in made]
    if kept:
        print(f"kept as they are: {', '.join(kept)}")
    for name in made:
        print(f"made: {flags.out / name}, valid for {flags.days} days; carry it to {name}'s machine, and nowhere else")
    if made:
        print(
            f"{flags.out / AUTHORITY_KEY} signs for any name of {roster.run}: no island needs it, keep it off their "
            "machines; you need it here again to add an island"
        )
    return 0


def _status(flags: argparse.Namespace) -> int:
    """Asks every island how it is; those that do not answer have a line that says why."""
    roster = read_roster(flags.roster)
    if not 0 < flags.seconds <= 600:
        raise UserError(f"--seconds={flags.seconds}: give more than 0 and up to 600")
    make_console().print(status_table(roster, ask_all(clients_of(roster, flags.keys), flags.seconds)))
    return 0


def _merge(flags: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Writes the mean of the islands' weights, and says whose are in it."""
    if (flags.roster is None) == (flags.workdirs is None):
        raise UserError("give --roster=FILE of islands that train, or --workdirs DIR DIR ... of those that ended")
    if not all(override.startswith("--config.data.") for override in overrides):
        raise UserError("merge takes no fields but --config.data.NAME=VALUE: the islands say what they train")
    if not 0 < flags.seconds <= 86400:
        raise UserError(f"--seconds={flags.seconds}: give more than 0 and up to 86400")
    check_new_folder(flags.out)
    if not flags.evaluate:
        jax.config.update("jax_platforms", "cpu")  # accelerators may be a training's
    if flags.roster is None:
        source = of_folders(flags.workdirs)
    else:
        source = of_live_islands(read_roster(flags.roster), flags.keys, min(flags.seconds, 10.0), flags.seconds)
    config = overridden(source.config, overrides)
    tokenizer = tokenizer_of(config.data)
    if tokenizer is not None:
        source.check_tokenizer(tokenizer)
    merged = mean_of(source, print, flags.at_least)
    for line in write_model_folder(flags.out, merged.params, config, tokenizer, str(merged)):
        print(line)
    if flags.evaluate:
        perplexity = perplexity_of(config, merged.params, tokenizer)
        print(f"merged model: validation perplexity {format_perplexity(perplexity)}")
    return 0


def _report(flags: argparse.Namespace) -> int:
    """Shows what became of each island, and draws it."""
    rows = [row_of(workdir) for workdir in flags.workdirs]
    make_console().print(report_table(rows))
    print(f"picture: {draw_islands([row.history for row in rows], flags.out)}")
    return 0


def _gather(flags: argparse.Namespace) -> int:
    """Makes a run of one program of islands that have ended."""
    jax.config.update("jax_platforms", "cpu")
    gather(flags.workdirs, flags.out, print)
    return 0


def _scatter(flags: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Makes islands of a run of one program."""
    jax.config.update("jax_platforms", "cpu")
    config = overridden(load_saved(flags.workdir), overrides)
    scatter(flags.workdir, config, read_roster(flags.roster), flags.out, print)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__ or "", prog="python -m noloco_jax.island")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    commands.add_parser("train", help=_TRAIN, add_help=False)  # read by `_train`

    keys = _command(commands, "keys", _keys, "make an authority and keys for each island that has none")
    _define_roster_flag(keys)
    keys.add_argument("--out", required=True, type=folder_of_flag, metavar="DIR", help="where they go, a folder each")
    keys.add_argument("--days", type=int, default=730, help="for which certificates are valid (default %(default)s)")
    keys.add_argument(
        "--replace", action="append", default=[], metavar="NAME", help="make this island's anew; may be repeated"
    )
    status = _command(commands, "status", _status, "show how all islands are")
    _define_roster_flag(status)
    _define_keys_flag(status)
    status.add_argument("--seconds", type=float, default=10.0, help="to wait for each (default %(default)s)")
    _define_merge_flags(_command(commands, "merge", _merge, "write the mean of islands' weights as a model's folder"))
    report = _command(commands, "report", _report, "show what became of islands, and draw it over time")
    _define_workdirs_flag(report, required=True)
    report.add_argument("--out", required=True, type=folder_of_flag, metavar="FILE", help="the picture, a PNG")
    gathering = _command(commands, "gather", _gather, "make a run of one program of islands that have ended")
    _define_workdirs_flag(gathering, required=True)
    gathering.add_argument("--out", required=True, type=folder_of_flag, metavar="DIR", help="its workdir, new or empty")
    scattering = _command(commands, "scatter", _scatter, "make islands of a run of one program")
    scattering.add_argument("--workdir", required=True, type=folder_of_flag, metavar="DIR", help="the run's folder")
    _define_roster_flag(scattering)
    scattering.add_argument("--out", required=True, type=folder_of_flag, metavar="DIR", help="gets a workdir for each")
    return parser


def _define_merge_flags(parser: argparse.ArgumentParser) -> None:
    _define_roster_flag(parser, required=False)
    _define_keys_flag(parser)
    _define_workdirs_flag(parser, required=False)
    parser.add_argument(
        "--out", required=True, type=folder_of_flag, metavar="DIR", help="the folder to write, new or empty"
    )
    parser.add_argument(
        "--at_least", type=int, default=1, metavar="K", help="refuse a mean of fewer islands (default %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="to wait for each one's weights (default %(default)s)"
    )
    parser.add_argument(
        "--evaluate",
        action="store_true",
        help="print its validation perplexity too, computed on this machine's accelerators if it has some, with the "
        "data at the islands' path, or at another --config.data.path",
    )


def _command(commands, name: str, run, help: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
    parser.set_defaults(run=run)
    return parser


def _define_roster_flag(parser: argparse.ArgumentParser, required: bool = True) -> None:
    parser.add_argument(
        "--roster", required=required, type=folder_of_flag, metavar="FILE", help="the run's islands, a TOML file"
    )


def _define_keys_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keys",
        type=folder_of_flag,
        metavar="DIR",
        help="the folder that `island keys` made, or one island's own: that island itself is then not asked",
    )


def _define_workdirs_flag(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument(
        "--workdirs", required=required, nargs="+", type=folder_of_flag, metavar="DIR", help="folders of islands"
    )


if __name__ == "__main__":
    main_with_errors(main)
