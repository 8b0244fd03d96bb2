"""The command line: `--config=FILE[:ARGUMENT]`, `--config.FIELD=VALUE` for every field, and a tool's own flags.

A config file is plain Python with a `get_config()` that returns an `ml_collections.ConfigDict` of the fields it sets;
the dataclasses of `config` supply the rest, so that any field can be set by a flag whether the file lists it or not.
"""

import argparse
import dataclasses
import difflib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import flags
from ml_collections import ConfigDict, FrozenConfigDict, config_dict, config_flags

from noloco_jax.config.fields import (
    FieldInfo,
    TrainConfig,
    checked_value,
    field_types,
    from_dict,
    known_fields,
    to_dict,
    unknown_field,
)
from noloco_jax.errors import UserError

_OVERRIDE = re.compile(r"--?(?P<no>no)?config\.(?P<path>[^=]+)(?P<value>=.*)?", re.DOTALL)


def load_config(file: str, overrides: Sequence[str] = ()) -> ConfigDict:
    """The complete configuration: `file`'s values over the defaults, `overrides` (`--config.FIELD=VALUE`) over both.

    `file` is a path, or `path:argument` for a `get_config(argument)`. References between fields (`config.get_ref`)
    follow the overrides. Types are checked; consistency is `from_dict`'s, once the values are final.
    """
    config = _read(file)
    _complete(config, TrainConfig, "")
    values = flags.FlagValues()
    argv = ["", *_known_overrides(overrides)]
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
        values(argv)
    except (flags.Error, ValueError) as error:
        raise _override_error(str(error)) from None
    return values.config


def _override_error(message: str) -> UserError:
    """absl's message about a value, shortened to what the field takes."""
    value = re.match(r"flag (--config\.([\w.]+)=.*?): ", message, re.DOTALL)
    return UserError(f"{value[1]}: expected {known_fields()[value[2]].type.__name__}" if value else message)


def _read(file: str) -> ConfigDict:
    path, _, argument = file.partition(":")
    if not Path(path).is_file():
        near = difflib.get_close_matches(path, [str(other) for other in Path(path).parent.glob("*.py")], n=1)
        raise UserError(
            f"config file {path} does not exist: {f'did you mean {near[0]}?' if near else 'check --config'}"
        )
    spec = importlib.util.spec_from_file_location("noloco_config_file", path)
    if spec is None or spec.loader is None:
        raise UserError(f"config file {path} is not Python: --config takes a .py file with a get_config()")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        get_config = module.get_config
        if argument and not inspect.signature(get_config).parameters:
            raise UserError(f"config file {path} takes no argument, got {argument!r}: leave ':{argument}' out")
        config = get_config(argument) if argument else get_config()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"config file {path}{_where(path, error)}: {type(error).__name__}: {error}") from error
    if isinstance(config, FrozenConfigDict):
        config = config.as_configdict()
    elif isinstance(config, dict):
        config = ConfigDict(config)
    if not isinstance(config, ConfigDict):
        raise UserError(f"config file {path}: get_config() returned a {type(config).__name__}, not a ConfigDict")
    return config


def _where(path: str, error: Exception) -> str:
    """The last line of the file itself that led to the error."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(path)]
    return f" line {lines[-1]}" if lines else ""


def _complete(config: ConfigDict, cls: type, prefix: str) -> None:
    """Adds the fields that are missing and gives every field its declared type, in place to keep references alive."""
    fields = field_types(cls)
    for name in config:
        if name not in fields:
            raise unknown_field(f"{prefix}{name}")
    defaults = {
        entry.name: entry.default for entry in dataclasses.fields(cls) if entry.default is not dataclasses.MISSING
    }
    references = dict(config.items(preserve_field_references=True))
    with config.unlocked():
        for name, (kind, optional) in fields.items():
            path = f"{prefix}{name}"
            value = config[name] if name in config else defaults.get(name)
            if dataclasses.is_dataclass(kind):
                if value is None:
                    _put(config, name, value := ConfigDict())
                if not isinstance(value, ConfigDict):
                    raise UserError(f"config field {path}: expected a group of fields, got {value!r}")
                _complete(value, kind, path + ".")
            elif value is None and (optional or name not in defaults):
                _put(config, name, config_dict.placeholder(kind))
            elif name not in config or config.get_type(name) is not kind:
                value = checked_value(path, kind, optional, value)
                if isinstance(references.get(name), config_dict.FieldReference):
                    raise UserError(f"config field {path}: other fields refer to it, so write {value!r} for its number")
                _put(config, name, value)


def _put(config: ConfigDict, name: str, value: Any) -> None:
    if name in config:
        del config[name]  # assigning would keep the old type
    config[name] = value


def _known_overrides(arguments: Iterable[str]) -> list[str]:
    """The overrides themselves, once each of them names a field."""
    arguments = list(arguments)
    for argument in arguments:
        _field(argument)
    return arguments


def _field(argument: str) -> tuple[str, FieldInfo]:
    """The dotted path that an override sets, and what it is."""
    match = _OVERRIDE.fullmatch(argument)
    if match is None:
        raise UserError(f"{argument!r} is not of the form --config.FIELD=VALUE")
    path, fields = match["path"], known_fields()
    if path not in fields and any(name.startswith(path + ".") for name in fields):
        raise UserError(f"--config.{path} is a group: set one of its fields, such as --config.{path}.FIELD=VALUE")
    if path not in fields:
        raise unknown_field(path)
    return path, fields[path]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown:
            name = unknown[1].partition("=")[0]
            near = difflib.get_close_matches(name, self._option_string_actions, n=1)
            message = f"unknown argument {unknown[1]!r}: " + (f"did you mean {near[0]!r}?" if near else "see --help")
        raise UserError(message)


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
    """The checked configuration and the values of a tool's own flags.

    Args:
      argv: the arguments without the program's name; None takes `sys.argv[1:]`.
      description: the first lines of `--help`.
      define_flags: adds the tool's flags to the parser; `--config` and `--config.*` are there already.
      prog: the command that `--help` shows.

    Raises `UserError` for anything that is wrong in them.
    """
    parser = make_parser(description, prog)
    parser.epilog = _fields_help()
    parser.add_argument(
        "--config", required=True, metavar="FILE[:ARGUMENT]", help="a config file, such as configs/quickstart.py"
    )
    if define_flags is not None:
        define_flags(parser)
    overrides, own = split_overrides(sys.argv[1:] if argv is None else argv)
    namespace = parser.parse_args(own)
    return from_dict(load_config(namespace.config, overrides)), namespace


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """`argv` as (overrides, the rest); `--config.FIELD VALUE` becomes `--config.FIELD=VALUE`."""
    overrides, rest, arguments = [], [], iter(argv)
    for argument in arguments:
        match = _OVERRIDE.fullmatch(argument)
        if match is None:
            rest.append(argument)
            continue
        path, field = _field(argument)
        if match["value"] is None and field.type is not bool:
            value = next(arguments, None)
            if value is None:
                raise UserError(f"--config.{path} has no value: give --config.{path}=VALUE")
            argument = f"--config.{path}={value}"
        overrides.append(argument)
    return overrides, rest


def _fields_help() -> str:
    defaults = to_dict(TrainConfig())
    lines = ["config fields, each set by --config.FIELD=VALUE, and their defaults where the file gives no value:"]
    for path, field in known_fields().items():
        value: Any = defaults
        for name in path.split("."):
            value = value[name] if value is not None else None
        lines.append(f"  {path:<54}{field.type.__name__:<7}{value!r}")
    return "\n".join(lines)
