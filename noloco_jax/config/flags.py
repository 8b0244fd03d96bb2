"""The command line: `--config=FILE[:ARGUMENT]`, `--config.FIELD=VALUE` for every field, and a tool's own flags.

A config file sets the fields that it cares about, flags set any field over it, and the dataclasses supply the rest,
with the method's own values for the fields of `outer` that methods disagree on.
"""

import argparse
import collections
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from noloco_jax.config.build import find_field, from_dict, known_fields, nearest
from noloco_jax.config.config_file import bundled_names, read_config_file, to_dict
from noloco_jax.config.fields import TrainConfig
from noloco_jax.config.schema import NAME, shown
from noloco_jax.errors import Mistakes, UserError

_OVERRIDE = re.compile(r"--?config\.([^=]+)(?:=(.*))?", re.DOTALL)


def load_config(file: str, overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the configuration of a file (`read_config_file`) with `overrides` (`--config.FIELD=VALUE`) over it.

    Raises `UserError` for anything that is wrong in them.
    """
    values, mistakes = _given(overrides)
    return from_dict(read_config_file(file), values, mistakes)


def overridden(config: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    """Return a configuration with `overrides` over it, as `load_config` sets them over a file."""
    values, mistakes = _given(overrides)
    return from_dict(to_dict(config), values, mistakes)


def _given(overrides: Sequence[str]) -> tuple[dict[str, Any], Mistakes]:
    """Return what overrides set, by dotted path, and the mistakes in them."""
    found = _read(overrides, mistakes := Mistakes())
    mistakes.note(*(f"{shown(argument)} is not of the form --config.FIELD=VALUE" for argument in found.rest))
    return found.values, mistakes


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `argv` into (overrides, the rest); `--config.FIELD VALUE` becomes `--config.FIELD=VALUE`."""
    found = _read(argv, mistakes := Mistakes())
    mistakes.raise_all()
    return found.overrides, found.rest


class _Arguments(NamedTuple):
    """Arguments of a command line: what overrides set, by dotted path; these as text; and all others."""

    values: dict[str, Any]
    overrides: list[str]
    rest: list[str]


def _read(argv: Sequence[str], mistakes: Mistakes) -> _Arguments:
    """Take the overrides out of `argv`, without what is noted as a mistake; a range is checked by `from_dict`."""
    found, arguments = _Arguments({}, [], []), collections.deque(argv)
    while arguments:
        argument = arguments.popleft()
        match = _OVERRIDE.fullmatch(argument)
        if match is None:
            found.rest.append(argument)
            continue
        path, text = match.groups()
        try:
            field = find_field(path)
            if field.is_group and not (field.optional and text == "None"):
                inside = f"--config.{path}.NAME.FIELD=VALUE" if field.by_name else f"--config.{path}.FIELD=VALUE"
                raise UserError(f"--config.{path} is a group: set one of its fields, such as {inside}")
        except UserError as error:
            mistakes.note(*error.args)
            if text is None and arguments and not arguments[0].startswith("-"):
                arguments.popleft()  # its value
            continue
        if text is None and field.type is bool:
            text = "True"
        elif text is None and not arguments:
            mistakes.note(f"--config.{path} has no value: give --config.{path}=VALUE")
            continue
        elif text is None:
            text = arguments.popleft()
            argument = f"--config.{path}={text}"
        try:
            found.values[path] = field.parsed(text)
            found.overrides.append(argument)
        except ValueError:
            told = argument if argument.isprintable() and len(argument) < 200 else shown(argument)
            mistakes.note(f"{told} is not allowed: give {field.given}")
    return found


class _Parser(argparse.ArgumentParser):
    _given: Sequence[str] = ()

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        self._given = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        # A flag that is required may be there under a wrong name.
        wrong = [unknown[1]] if unknown else [given for given in self._given if given.startswith("--")]
        for argument in wrong if unknown or "required" in message else []:
            if meant := self._meant(argument):
                raise UserError(f"unknown argument {argument!r}: did you mean {' or '.join(map(repr, meant))}?")
        raise UserError(f"unknown argument {unknown[1]!r}: see --help" if unknown else message)

    def _meant(self, argument: str) -> list[str]:
        """Return the flags, of the tool or of config fields, that an unknown one may stand for."""
        name, equals, value = argument.partition("=")
        flags, word = self._option_string_actions, name.lstrip("-")
        if name in flags:
            return []
        fields = [path for path in known_fields() if f".{NAME}." not in path] if "--config" in flags else []
        paths = [path for path in fields if path == word]
        own = {flag.lstrip("-"): flag for flag in flags}
        leaves = [path.rpartition(".")[2] for path in fields]
        near = nearest(word, own, cutoff=0.8) or nearest(word, [*own, *leaves])
        if not paths and near in own:
            return [own[near]]
        paths = paths or [path for path in fields if path.rpartition(".")[2] == near]
        return [f"--config.{path}{equals}{value}" for path in paths]


def make_parser(description: str, prog: str | None = None) -> argparse.ArgumentParser:
    """A parser for a tool's own flags whose errors are `UserError`s and whose flags cannot be abbreviated."""
    return _Parser(
        prog=prog,
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parse_args(
    argv: Sequence[str] | None,
    description: str,
    define_flags: Callable[[argparse.ArgumentParser], Any] | None = None,
    prog: str | None = None,
) -> tuple[TrainConfig, argparse.Namespace]:
    """Parse the command line into the checked configuration and the values of a tool's own flags.

    Args:
      argv: the arguments without the program's name; None takes `sys.argv[1:]`.
      description: the first lines of `--help`.
      define_flags: adds the tool's flags to the parser; `--config` and `--config.*` are there already.
      prog: the command that `--help` shows.

    Raises `UserError` for anything that is wrong in them.
    """
    parser = make_parser(description, prog)
    parser.epilog = "config fields: configs/FIELDS.md, which `python -m noloco_jax.config.reference` prints"
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE[:ARGUMENT]",
        help="a config file, or a run's config.json; configs/NAME.py that does not exist is the package's own of that "
        f"name: {', '.join(bundled_names())}",
    )
    if define_flags is not None:
        define_flags(parser)
    found = _read(sys.argv[1:] if argv is None else argv, mistakes := Mistakes())
    namespace = argparse.Namespace()
    with mistakes.noted():
        namespace = parser.parse_args(found.rest)
    if "config" not in namespace:
        mistakes.raise_all()
    return from_dict(read_config_file(namespace.config), found.values, mistakes), namespace
