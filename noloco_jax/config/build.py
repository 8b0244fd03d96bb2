"""Conversion of a ConfigDict or a mapping to the checked dataclasses, and to a run's record and back."""

import dataclasses
import difflib
import functools
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from noloco_jax.config.checks import checked, validate
from noloco_jax.config.fields import TrainConfig
from noloco_jax.config.schema import Entries, FieldInfo, field_at, fields_of, leaf_fields, shown
from noloco_jax.errors import Mistakes, UserError, described
from noloco_jax.files import write_whole

CONFIG_FILE = "config.json"
_ENTRY_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


def from_dict(values: ConfigDict | Mapping[str, Any]) -> TrainConfig:
    """Build the checked configuration; fields that `values` leaves out take the dataclasses' defaults.

    A warmup longer than the run is shortened, with a warning. Raises `UserError` with all unknown fields and values of
    another type; where there are none, with all fields that contradict each other.
    """
    config = _with_warmup_inside(unchecked(values))
    validate(config)
    return config


def _with_warmup_inside(config: TrainConfig) -> TrainConfig:
    """Shorten a warmup that is longer than the run, which is then most often a trial, to a tenth of it."""
    steps, warmup = config.num_steps, config.inner.warmup_steps
    if warmup <= steps:
        return config
    warnings.warn(
        f"inner.warmup_steps={warmup} is more than num_steps={steps}: shortened to {steps // 10}, a tenth of the run",
        stacklevel=3,
    )
    return dataclasses.replace(config, inner=dataclasses.replace(config.inner, warmup_steps=steps // 10))


def unchecked(values: ConfigDict | Mapping[str, Any]) -> TrainConfig:
    """Build the configuration with each field checked by itself; the caller changes some, and calls `validate`."""
    mistakes, config = Mistakes(), None
    with mistakes.noted():
        config = _build(TrainConfig, _resolved(values) if isinstance(values, ConfigDict) else values, "", mistakes)
    mistakes.raise_all()
    assert config is not None
    return config


def _resolved(values: ConfigDict) -> dict[str, Any]:
    """Replace by plain values references between fields."""
    try:
        return values.to_dict()
    except Exception as error:  # the user's own arithmetic may raise anything
        raise UserError(f"config fields that refer to others have no value: {described(error)}") from error


def _build(cls: type, values: Any, prefix: str, mistakes: Mistakes) -> Any:
    """Build the dataclass of a group; None, which is not to be used, where there are mistakes."""
    if not isinstance(values, Mapping):
        raise UserError(f"config field {prefix[:-1]}: expected a group of fields, got {shown(values)}")
    fields = fields_of(cls)
    built = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        with mistakes.noted():
            if name not in fields:
                raise unknown_field(path)
            field = fields[name]
            if field.is_group:
                built[name] = (_entries if field.by_name else _group)(path, field, value, mistakes)
            elif value is not None or field.default is not dataclasses.MISSING:
                built[name] = checked(path, field, value)
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and values.get(name) is None:
            mistakes.note(UserError(f"config field {prefix}{name} is missing: the other {prefix}* fields need it"))
    return None if mistakes else cls(**built)


def _group(path: str, field: FieldInfo, values: Any, mistakes: Mistakes) -> Any:
    """The dataclass of a group; one that may be None is None also where all its fields are."""
    if field.optional and isinstance(values, Mapping | None):
        values = {name: value for name, value in (values or {}).items() if value is not None}
        if not values:
            return None
    return _build(field.type, values, path + ".", mistakes)


def _entries(path: str, field: FieldInfo, values: Any, mistakes: Mistakes) -> Entries[Any]:
    """The dataclass of every entry, in the order of their names; those that are None are left out."""
    if not isinstance(values, Mapping):
        raise UserError(f"config field {path}: expected groups of fields by name, got {shown(values)}")
    for name in values:
        if not (isinstance(name, str) and _ENTRY_NAME.fullmatch(name)):
            raise UserError(
                f"config field {path}: {shown(name)} is not a name for one of them: give letters, digits, - and _"
            )
    given = {name: values[name] for name in sorted(values) if values[name] is not None}
    return Entries({name: _build(field.type, value, f"{path}.{name}.", mistakes) for name, value in given.items()})


@functools.cache
def known_fields() -> dict[str, FieldInfo]:
    """Every field of a `TrainConfig` by its dotted path, see `leaf_fields`."""
    return leaf_fields(TrainConfig)


def find_field(path: str) -> FieldInfo:
    """The field or group of fields at a dotted path; raises `unknown_field`'s error where there is none."""
    field = field_at(TrainConfig, path)
    if field is None:
        raise unknown_field(path)
    return field


def unknown_field(path: str) -> UserError:
    """The error for a field that does not exist, with the names that may have been meant."""
    if path == "workdir":
        return UserError("unknown config field 'workdir': the folder of a run is a flag, --workdir=DIR")
    if (group := field_at(TrainConfig, path)) is not None and group.is_group:
        return UserError(f"{path!r} is a group of config fields: give one of them, {path}.NAME=VALUE")
    prefix, _, leaf = path.rpartition(".")
    parent = field_at(TrainConfig, prefix) if prefix else None
    if parent is None or not parent.is_group or parent.by_name:
        prefix, parent = "", None
    siblings = [f"{prefix}.{name}".lstrip(".") for name in fields_of(parent.type if parent else TrainConfig)]
    # Who gives a group that exists rarely means a field of another one.
    for names, cutoff in ((siblings, 0.65), (known_fields(), 0.9 if prefix else 0.65)):
        near = nearest(leaf, [name.rpartition(".")[2] for name in names], cutoff)
        if near is not None:
            meant = [repr(name) for name in names if name.rpartition(".")[2] == near]
            return UserError(f"unknown config field {path!r}: did you mean {' or '.join(meant)}?")
    return UserError(f"unknown config field {path!r}: the fields there are {', '.join(siblings)}")


def nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the name that may be meant by a word: seq_len by its parts' beginnings, steps as a part, else the nearest.

    Args:
      word: an unknown name.
      names: the known ones.
      cutoff: least similarity of the nearest one, from 0 to 1.
    """
    names, parts = list(names), word.split("_")
    if word in names or not all(parts):
        return word if word in names else None
    own = {name: name.split("_") for name in names}
    abbreviated = [
        name for name in names if len(own[name]) == len(parts) and all(map(str.startswith, own[name], parts))
    ]
    containing = sorted((name for name in names if {*parts} <= {*own[name]}), key=len)
    near = difflib.get_close_matches(word, names, n=1, cutoff=cutoff)
    return next(iter([*abbreviated, *containing, *near]), None)


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Nested plain values that JSON can hold and `from_dict` reads back."""
    return dataclasses.asdict(config)


def save_config(config: TrainConfig, workdir: str | os.PathLike[str]) -> Path:
    """Write the resolved configuration to WORKDIR/config.json, whole or not at all, and return its path."""
    return write_whole(Path(workdir) / CONFIG_FILE, json.dumps(to_dict(config), indent=2) + "\n")


def load_saved(workdir: str | os.PathLike[str]) -> TrainConfig:
    """Load the configuration that a run in `workdir` was started with.

    Raises `UserError` where the folder holds none, or a broken one.
    """
    path = Path(workdir) / CONFIG_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is not there: give the --workdir of a run that was started") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): restore it, or start afresh in another --workdir") from None
    try:
        return from_dict(values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
