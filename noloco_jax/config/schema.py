"""Description of a configuration's fields: type, default, meaning and allowed values."""

import dataclasses
import functools
import math
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from noloco_jax.errors import UserError

LARGEST_INT = 2**31 - 1
NAME = "NAME"  # stands in a dotted path for the name that the user gives to an entry
T = TypeVar("T")


@dataclass(frozen=True)
class Allowed:
    """Values of its type that a field takes. Printed, it is their range.

    Attributes:
      choices: the words that it takes; none: any.
      minimum: the least number.
      above: a number that every value exceeds.
      below: a number that every value stays under.
      besides: a number outside the range that is taken too.
      nonempty: whether the empty text is refused.
    """

    choices: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    below: float | None = None
    besides: float | None = None
    nonempty: bool = False

    def __contains__(self, value: Any) -> bool:
        if self.besides is not None and value == self.besides:
            return True
        return (
            (not self.choices or value in self.choices)
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (not self.nonempty or bool(value))
        )

    def __str__(self) -> str:
        bounds = {"of at least": self.minimum, "above": self.above, "below": self.below}
        text = " and ".join(f"{words} {bound}" for words, bound in bounds.items() if bound is not None)
        text += ", not empty" * self.nonempty
        return text if self.besides is None else f"{text}, or {self.besides}"


_TYPES = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
_BOOLS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}


@dataclass(frozen=True)
class FieldInfo:
    """A field of the configuration, or a group of fields.

    Attributes:
      type: of its values; a group's dataclass.
      optional: whether None is a value too.
      default: its value where none is given; `dataclasses.MISSING` where one has to be.
      meaning: one sentence; a group's is its dataclass's docstring.
      allowed: the values that it takes.
      by_name: whether it holds any number of such groups, its entries, each under a name that the user chooses.
    """

    type: type
    optional: bool
    default: Any
    meaning: str = ""
    allowed: Allowed = Allowed()
    by_name: bool = False

    @property
    def is_group(self) -> bool:
        return dataclasses.is_dataclass(self.type)

    @property
    def is_required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def given(self) -> str:
        """Its values as they follow "give"."""
        return f"{'one of ' * bool(self.allowed.choices)}{self.values}"

    @property
    def values(self) -> str:
        """Its choices, or its type and range in words, such as "a whole number of at least 1"."""
        if self.allowed.choices:
            return ", ".join(word or "''" for word in self.allowed.choices)
        text = f"{_TYPES[self.type]} {self.allowed}".replace(" ,", ",").strip()
        return text + (" or None" if self.optional else "")

    def parsed(self, text: str) -> Any:
        """Return the value that a text stands for, of the field's type; raises `ValueError` where it has none."""
        if text == "None" and self.optional:
            return None
        if self.type is not bool:
            return self.type(text)
        if text.lower() not in _BOOLS:
            raise ValueError(text)
        return _BOOLS[text.lower()]

    def checked(self, path: str, value: Any) -> Any:
        """Return a value of the field at `path`, an int as a float where one is due.

        Raises `UserError` for one of another type or outside the field's range, whatever the other fields are.
        """
        if value is None and self.optional:
            return None
        if self.type is float and type(value) is int and abs(value) <= sys.float_info.max:
            value = float(value)
        limit = ""
        if isinstance(value, float) and not math.isfinite(value):
            limit = " and finite"
        elif type(value) is int and self.allowed.below is None and value > LARGEST_INT:
            limit = f", up to {LARGEST_INT}"
        if limit or type(value) is not self.type or value not in self.allowed:
            raise UserError(f"{path}={shown(value)} is not allowed: give {self.given}{limit}")
        return value


class Entries(dict[str, T]):
    """Groups of fields by name, which nothing changes once it is made, so that a configuration can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


NO_ENTRIES: Entries[Any] = Entries()


def shown(value: Any) -> str:
    """Return the `repr` in one line, shortened for a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:100]}..."


def setting(default: Any, meaning: str, **allowed: Any) -> Any:
    """Return a dataclass field with its meaning, and its values in the terms of `Allowed`."""
    metadata = {"meaning": meaning, "allowed": Allowed(**allowed)}
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def fields_of(cls: type) -> Mapping[str, FieldInfo]:
    """The fields and groups of one dataclass by name."""
    annotations = typing.get_type_hints(cls)
    infos = {}
    for entry in dataclasses.fields(cls):
        annotation = annotations[entry.name]
        kinds = typing.get_args(annotation) or (annotation,)  # of `type | None` and `Entries[type]`
        by_name = typing.get_origin(annotation) is Entries
        optional = types.NoneType in kinds or entry.default is None  # also where None is replaced by a default
        infos[entry.name] = FieldInfo(kinds[0], optional, entry.default, **entry.metadata, by_name=by_name)
    return infos


def field_at(cls: type, path: str) -> FieldInfo | None:
    """The field or group at a dotted path, with any name for an entry; None where there is none."""
    field = FieldInfo(cls, optional=False, default=dataclasses.MISSING)
    for name in path.split("."):
        if field.by_name:
            field = replace(field, by_name=False, optional=True)  # None leaves an entry out
        elif field.is_group and name in fields_of(field.type):
            field = fields_of(field.type)[name]
        else:
            return None
    return field


def leaf_fields(cls: type, prefix: str = "") -> dict[str, FieldInfo]:
    """Every field of a dataclass and of the groups in it by dotted path, without the groups themselves.

    Entries stand there as one with the name `NAME`.
    """
    flat = {}
    for name, info in fields_of(cls).items():
        path = f"{prefix}{name}"
        inside = f"{path}.{NAME}." if info.by_name else f"{path}."
        flat |= leaf_fields(info.type, inside) if info.is_group else {path: info}
    return flat


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested groups as one dict by dotted path: {"outer": {"lr": 0.7}} becomes {"outer.lr": 0.7}."""
    flat = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat
