"""Islands: independent processes, one a replica, that train together over any network.

    python -m noloco_jax.island keys --roster=roster.toml --out=keys     # an authority, and keys for each island

`COMMAND --help` shows a command's flags.
"""

import argparse
from collections.abc import Sequence

from noloco_jax.config import make_parser
from noloco_jax.errors import UserError, main_with_errors
from noloco_jax.files import check_writable, folder_of_flag
from noloco_jax.islands.keys import AUTHORITY_KEY, make_keys
from noloco_jax.islands.roster import read_roster


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names."""
    flags = _parser().parse_args(argv)
    return flags.run(flags)


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


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__ or "", prog="python -m noloco_jax.island")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    keys = _command(commands, "keys", _keys, "make an authority and keys for each island that has none")
    keys.add_argument("--out", required=True, type=folder_of_flag, metavar="DIR", help="where they go, a folder each")
    keys.add_argument("--days", type=int, default=730, help="for which certificates are valid (default %(default)s)")
    keys.add_argument(
        "--replace", action="append", default=[], metavar="NAME", help="make this island's anew; may be repeated"
    )
    return parser


def _command(commands, name: str, run, help: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument(
        "--roster", required=True, type=folder_of_flag, metavar="FILE", help="the run's islands, a TOML file"
    )
    return parser


if __name__ == "__main__":
    main_with_errors(main)
