"""The command line: `--config=FILE[:ARGUMENT]`, `--config.FIELD=VALUE` for every field, and a tool's own flags.

A config file sets the fields that it cares about, flags set any field over it, and the dataclasses supply the rest,
with the method's own values for the fields of `outer` that methods disagree on. `--config.method` with another method
than the file's leaves out what the file sets of these, as it was chosen for the file's method.
"""

import argparse
import contextlib
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ml_collections import ConfigDict

from noloco_jax.config.build import find_field, from_dict, known_fields, to_dict
from noloco_jax.config.checks import checked
from noloco_jax.config.config_file import bundled_names, read_config_file
from noloco_jax.config.fields import TrainConfig
from noloco_jax.config.schema import FieldInfo, shown
from noloco_jax.errors import UserError
from noloco_jax.methods import METHOD_FIELDS

_OVERRIDE = re.compile(r"--?config\.([^=]+)(?:=(.*))?", re.DOTALL)
_BOOLS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


def load_config(file: str, overrides: Sequence[str] = ()) -> ConfigDict:
    """Return what `file` sets with `overrides` (`--config.FIELD=VALUE`) over it; `from_dict` checks and completes it.

    References between the file's fields (`config.get_ref`) follow the overrides. Where these name another method than
    the file's, the file's values of `METHOD_FIELDS` are left out. See `read_config_file` for `file`.
    """
    return _with_overrides(read_config_file(file), overrides)


def overridden(config: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    """Return the checked configuration with `overrides` over it, as those of `load_config` over a file."""
    return from_dict(_with_overrides(ConfigDict(to_dict(config)), overrides))


def _with_overrides(config: ConfigDict, overrides: Sequence[str]) -> ConfigDict:
    parsed = [_parse_override(override) for override in overrides]
    given, before, outer = dict(parsed), config.get("method", TrainConfig.method), config.get("outer")
    if given.get("method", before) != before and isinstance(outer, ConfigDict):
        for name in METHOD_FIELDS:
            if name in outer and f"outer.{name}" not in given:
                with outer.unlocked():
                    del outer[name]  # chosen for the method before
    for path, value in parsed:
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
            name, equals, value = argument.partition("=")
            flags = {flag.replace("_", ""): flag for flag in self._option_string_actions if flag != name}
            near = difflib.get_close_matches(name.replace("_", ""), flags, n=1)
            if "--config" in self._option_string_actions and (path := name.lstrip("-")) in known_fields():
                raise UserError(f"unknown argument {argument!r}: did you mean '--config.{path}{equals}{value}'?")
            if near and name not in self._option_string_actions:
                raise UserError(f"unknown argument {argument!r}: did you mean {flags[near[0]]!r}?")
        raise UserError(f"unknown argument {unknown[1]!r}: see --help" if unknown else message)


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
    overrides, own = split_overrides(sys.argv[1:] if argv is None else argv)
    namespace = parser.parse_args(own)
    return from_dict(load_config(namespace.config, overrides)), namespace


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `argv` into (overrides, the rest); `--config.FIELD VALUE` becomes `--config.FIELD=VALUE`."""
    overrides, rest, arguments = [], [], iter(argv)
    for argument in arguments:
        override = _split_override(argument)
        if override is None:
            rest.append(argument)
            continue
        path, field, text = override
        if text is None and field.type is not bool:
            value = next(arguments, None)
            if value is None:
                raise UserError(f"--config.{path} has no value: give --config.{path}=VALUE")
            argument = f"--config.{path}={value}"
        overrides.append(argument)
    return overrides, rest
