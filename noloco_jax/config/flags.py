"""The command line: `--config=FILE[:ARGUMENT]`, `--config.FIELD=VALUE` for every field, and a tool's own flags.

A config file sets the fields that it cares about, flags set any field over it, and the dataclasses supply the rest,
with the method's own values for the fields of `outer` that methods disagree on. `--config.method` with another method
than the file's leaves out what the file sets of these, as it was chosen for the file's method.
"""

import argparse
import collections
import contextlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ml_collections import ConfigDict

from noloco_jax.config.build import find_field, from_dict, known_fields, nearest, to_dict
from noloco_jax.config.checks import checked
from noloco_jax.config.config_file import bundled_names, read_config_file
from noloco_jax.config.fields import TrainConfig
from noloco_jax.config.schema import NAME, FieldInfo, shown
from noloco_jax.errors import Mistakes, UserError
from noloco_jax.optim.methods import METHOD_FIELDS

_OVERRIDE = re.compile(r"--?config\.([^=]+)(?:=(.*))?", re.DOTALL)
_BOOLS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


def load_config(file: str, overrides: Sequence[str] = ()) -> ConfigDict:
    """Return what `file` sets with `overrides` (`--config.FIELD=VALUE`) over it; `from_dict` checks and completes it.

    References between the file's fields (`config.get_ref`) follow the overrides. Where these name another method than
    the file's, the file's values of `METHOD_FIELDS` are left out. See `read_config_file` for `file`.
    """
    mistakes = Mistakes()
    config = _with_overrides(read_config_file(file), overrides, mistakes)
    mistakes.raise_all()
    return config


def overridden(config: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    """Return the checked configuration with `overrides` over it, as those of `load_config` over a file."""
    return _checked(ConfigDict(to_dict(config)), overrides, Mistakes())


def _checked(config: ConfigDict, overrides: Sequence[str], mistakes: Mistakes) -> TrainConfig:
    """Return the checked configuration; raise `mistakes` together with those of the overrides and between fields."""
    checked = None
    config = _with_overrides(config, overrides, mistakes)
    with mistakes.noted():
        checked = from_dict(config)
    mistakes.raise_all()
    assert checked is not None
    return checked


def _with_overrides(config: ConfigDict, overrides: Sequence[str], mistakes: Mistakes) -> ConfigDict:
    """Set fields in place, without what is noted as a mistake; return the configuration."""
    parsed = []
    for override in overrides:
        with mistakes.noted():
            parsed.append(_parse_override(override))
    given, before, outer = dict(parsed), config.get("method", TrainConfig.method), config.get("outer")
    if given.get("method", before) != before and isinstance(outer, ConfigDict):
        for name in METHOD_FIELDS:
            if name in outer and f"outer.{name}" not in given:
                with outer.unlocked():
                    del outer[name]  # chosen for the method before
    for path, value in parsed:
        with mistakes.noted():
            _assign(config, path, value)
    return config


def _assign(config: ConfigDict, path: str, value: Any) -> None:
    """Set a field in place, so that references to it follow, and make the groups that are missing."""
    *groups, name = path.split(".")
    for depth, group in enumerate(groups, start=1):
        if config.get(group) is None:
            with config.unlocked():
                config[group] = ConfigDict()
        inside = config[group]
        if not isinstance(inside, ConfigDict):
            raise UserError(f"config field {'.'.join(groups[:depth])}: expected a group of fields, got {shown(inside)}")
        config = inside
    # Unlocking computes what follows other fields, which may have no value before all flags are set.
    unlocked = contextlib.nullcontext() if name in config else config.unlocked()
    with unlocked, config.ignore_type():  # the field's own type counts, not that of the file's value
        config[name] = value


def _parse_override(argument: str) -> tuple[str, Any]:
    """The dotted path that an override sets, and the value."""
    override = _split_override(argument)
    if override is None:
        raise UserError(f"{shown(argument)} is not of the form --config.FIELD=VALUE")
    path, field, text = override
    if text is None and field.type is bool:
        return path, True
    if text == "None" and field.optional:
        return path, None
    try:
        value = _BOOLS[str(text).lower()] if field.type is bool else field.type(str(text))
    except (KeyError, ValueError):
        given = argument if argument.isprintable() and len(argument) < 200 else shown(argument)
        raise UserError(f"{given} is not allowed: give {field.given}") from None
    return path, checked(path, field, value)  # before other fields are computed from it


def _split_override(argument: str) -> tuple[str, FieldInfo, str | None] | None:
    """The path, the field and the text of `--config.FIELD[=VALUE]`, None of any other argument."""
    match = _OVERRIDE.fullmatch(argument)
    if match is None:
        return None
    path, text = match.groups()
    field = find_field(path)
    if field.is_group and not (field.optional and text == "None"):
        inside = f"--config.{path}.NAME.FIELD=VALUE" if field.by_name else f"--config.{path}.FIELD=VALUE"
        raise UserError(f"--config.{path} is a group: set one of its fields, such as {inside}")
    return path, field, text


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
    mistakes, namespace = Mistakes(), argparse.Namespace()
    overrides, own = _split_overrides(sys.argv[1:] if argv is None else argv, mistakes)
    with mistakes.noted():
        namespace = parser.parse_args(own)
    if "config" not in namespace:
        mistakes.raise_all()
    return _checked(read_config_file(namespace.config), overrides, mistakes), namespace


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `argv` into (overrides, the rest); `--config.FIELD VALUE` becomes `--config.FIELD=VALUE`."""
    mistakes = Mistakes()
    found = _split_overrides(argv, mistakes)
    mistakes.raise_all()
    return found


def _split_overrides(argv: Sequence[str], mistakes: Mistakes) -> tuple[list[str], list[str]]:
    overrides, rest, arguments = [], [], collections.deque(argv)
    while arguments:
        argument = arguments.popleft()
        try:
            override = _split_override(argument)
        except UserError as error:
            mistakes.note(error)
            if "=" not in argument and arguments and not arguments[0].startswith("-"):
                arguments.popleft()  # its value
            continue
        if override is None:
            rest.append(argument)
            continue
        path, field, text = override
        if text is None and field.type is not bool:
            if not arguments:
                mistakes.note(UserError(f"--config.{path} has no value: give --config.{path}=VALUE"))
                continue
            argument = f"--config.{path}={arguments.popleft()}"
        overrides.append(argument)
    return overrides, rest
