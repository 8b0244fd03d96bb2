"""Description of a configuration's fields: type, default, meaning and allowed values."""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

NAME = "NAME"  # stands in a dotted path for the name that the user gives to an entry
T = TypeVar("T")


@dataclass(frozen=True)
class Allowed:
    """Values of its type that a field takes. Printed, it completes "give ...".

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
        if self.choices:
            return "one of " + ", ".join(word or "''" for word in self.choices)
        bounds = {
            f"{self.minimum} or more": self.minimum is not None,
            f"more than {self.above}": self.above is not None,
            f"less than {self.below}": self.below is not None,
            "a text that is not empty": self.nonempty,
        }
        text = " and ".join(bound for bound, holds in bounds.items() if holds)
        return text if self.besides is None else f"{text}, or {self.besides}"


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
    def type_name(self) -> str:
        """Name for messages, such as "float" or "float or None"."""
        return self.type.__name__ + (" or None" if self.optional else "")


class Entries(dict[str, T]):
    """Groups of fields by name. It cannot be changed, so that a configuration that holds it can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("a configuration cannot be changed")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]


NO_ENTRIES: Entries[Any] = Entries()


def shown(value: Any) -> str:
    """Return the `repr` in one line, shortened for a message."""
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # the value's own __repr__ may raise; Python prints no integer of more than 4300 digits
        is_number = isinstance(value, int) and isinstance(error, ValueError)
        text = "a number of thousands of digits" if is_number else "a value that cannot be printed"
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
        kind, optional = _without_none(annotations[entry.name])
        by_name = typing.get_origin(kind) is Entries
        if by_name:
            (kind,) = typing.get_args(kind)
        optional = optional or entry.default is None  # also where None does not outlive the configuration's building
        infos[entry.name] = FieldInfo(kind, optional, entry.default, **entry.metadata, by_name=by_name)
    return types.MappingProxyType(infos)


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


def _without_none(annotation: Any) -> tuple[type, bool]:
    """The type itself of `type | None`, and whether None was there."""
    if isinstance(annotation, types.UnionType):
        (kind,) = (member for member in typing.get_args(annotation) if member is not types.NoneType)
        return kind, True
    return annotation, False


def leaf_fields(cls: type) -> dict[str, FieldInfo]:
    """Every field of a dataclass and of the groups in it by dotted path, without the groups themselves.

    Entries stand there as one with the name `NAME`.
    """

    def branch(info: FieldInfo) -> Any:
        if not info.is_group:
            return info
        return {NAME: tree(info.type)} if info.by_name else tree(info.type)

    def tree(cls: type) -> dict[str, Any]:
        return {name: branch(info) for name, info in fields_of(cls).items()}

    return flatten(tree(cls))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested groups as one dict by dotted path: {"outer": {"lr": 0.7}} becomes {"outer.lr": 0.7}."""
    flat = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat
