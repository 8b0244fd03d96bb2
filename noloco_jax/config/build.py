"""The border of a configuration: `from_dict` makes checked dataclasses of a file's values and of what flags change."""

import contextlib
import dataclasses
import difflib
import functools
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from noloco_jax.config.checks import contradictions
from noloco_jax.config.fields import TrainConfig
from noloco_jax.config.schema import Entries, FieldInfo, field_at, fields_of, leaf_fields, shown
from noloco_jax.errors import Mistakes, UserError, described
from noloco_jax.optim.methods import METHOD_FIELDS

_ENTRY_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


def from_dict(
    values: ConfigDict | Mapping[str, Any],
    changes: Mapping[str, Any] | None = None,
    mistakes: Mistakes | None = None,
) -> TrainConfig:
    """Build the configuration, which is checked here and nowhere else.

    Fields that are not given take the dataclasses' defaults. A warmup longer than the run is shortened, with a warning.

    Args:
      values: groups and fields; of a `ConfigDict`, references between fields follow `changes`, which are set in it.
      changes: dotted path -> value, over `values`. Where they name another method, the values of `METHOD_FIELDS`, which
        were chosen for the method before, are left out.
      mistakes: those found so far, to be reported with the others.

    Raises:
      UserError: all unknown fields and values of another type or range; where those of `values` have none, also all
        fields that contradict each other.
    """
    mistakes, found, config = mistakes or Mistakes(), Mistakes(), None
    with found.noted():
        config = _build(TrainConfig, changed(values, changes, found) if changes else values, "", found)
    if config is not None:
        config = _with_warmup_inside(config)
        found.note(*contradictions(config))
    mistakes.note(*found.messages)
    mistakes.raise_all()
    assert config is not None
    return config


def from_record(values: Mapping[str, Any]) -> TrainConfig:
    """Build the configuration that a run has recorded, as it is: it was checked as a whole when the run started."""
    mistakes, config = Mistakes(), None
    with mistakes.noted():
        config = _build(TrainConfig, values, "", mistakes)
    mistakes.raise_all()
    assert config is not None
    return config


def changed(values: ConfigDict | Mapping[str, Any], changes: Mapping[str, Any], mistakes: Mistakes) -> ConfigDict:
    """Set fields, in place in a `ConfigDict`, as `from_dict` describes."""
    config = values if isinstance(values, ConfigDict) else ConfigDict(values)
    before, outer = config.get("method", TrainConfig.method), config.get("outer")
    if changes.get("method", before) != before and isinstance(outer, ConfigDict):
        for name in METHOD_FIELDS:
            if name in outer and f"outer.{name}" not in changes:
                with _computed("outer"), outer.unlocked():
                    del outer[name]
    for path, value in changes.items():
        with mistakes.noted(), _computed(path):
            field = field_at(TrainConfig, path)
            if field is not None and not field.is_group:  # a refused value is not set: what follows it would be too
                value = field.checked(path, value)
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
    # Unlocking computes what follows other fields, which may have no value before all are set.
    unlocked = contextlib.nullcontext() if name in config else config.unlocked()
    with unlocked, config.ignore_type():  # the field's own type counts, not that of the file's value
        config[name] = value


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


def _build(cls: type, values: Any, prefix: str, mistakes: Mistakes) -> Any:
    """Build the dataclass of a group, of which every value is checked; None where there are mistakes."""
    if not _is_mapping(values):
        raise UserError(f"config field {prefix[:-1]}: expected a group of fields, got {shown(values)}")
    fields, built = fields_of(cls), {}
    for name in values:
        path = f"{prefix}{name}"
        with mistakes.noted():
            if name not in fields:
                raise unknown_field(path)
            field, value = fields[name], _value(values, name, path)
            if field.is_group:
                built[name] = (_entries if field.by_name else _group)(path, field, value, mistakes)
            elif value is None and field.is_required:
                raise _missing(prefix, name)
            else:
                built[name] = field.checked(path, value)
    for name, field in fields.items():
        if field.is_required and name not in values:
            mistakes.note(str(_missing(prefix, name)))
    return None if mistakes else cls(**built)


def _missing(prefix: str, name: str) -> UserError:
    return UserError(f"config field {prefix}{name} is missing: the other {prefix}* fields need it")


def _is_mapping(values: Any) -> bool:
    return isinstance(values, Mapping | ConfigDict)


@contextlib.contextmanager
def _computed(path: str) -> Iterator[None]:
    """Raise `UserError` where the body computes a field that follows others, and that fails."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the user's own arithmetic may raise anything
        raise UserError(f"config field {path}: what follows other fields has no value: {described(error)}") from error


def _value(values: Any, name: str, path: str) -> Any:
    with _computed(path):
        return values[name]


def _group(path: str, field: FieldInfo, values: Any, mistakes: Mistakes) -> Any:
    """The dataclass of a group; one that may be None is None also where all its fields are."""
    is_empty = _is_mapping(values) and all(_value(values, name, f"{path}.{name}") is None for name in values)
    if field.optional and (values is None or is_empty):
        return None
    return _build(field.type, values, path + ".", mistakes)


def _entries(path: str, field: FieldInfo, values: Any, mistakes: Mistakes) -> Entries[Any]:
    """The dataclass of every entry, in the order of their names; those that are None are left out."""
    if not _is_mapping(values):
        raise UserError(f"config field {path}: expected groups of fields by name, got {shown(values)}")
    for name in values:
        if not (isinstance(name, str) and _ENTRY_NAME.fullmatch(name)):
            raise UserError(
                f"config field {path}: {shown(name)} is not a name for one of them: give letters, digits, - and _"
            )
    given = {name: _value(values, name, f"{path}.{name}") for name in sorted(values)}
    return Entries(
        {
            name: _build(field.type, value, f"{path}.{name}.", mistakes)
            for name, value in given.items()
            if value is not None
        }
    )


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
