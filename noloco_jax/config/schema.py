"""How a field of a configuration describes itself: its type, default and meaning, and which values it takes."""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# What a run that goes on from a checkpoint may do with a field: keep its value, take another and say so, or take any.
OnResume = Literal["must match", "may change", "free"]


@dataclass(frozen=True)
class Allowed:
    """Which values of its type a field takes. Printed, it completes "give ...".

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
      on_resume: whether a run may go on from a checkpoint with another value; "free" are fields that change no figure.
    """

    type: type
    optional: bool
    default: Any
    meaning: str = ""
    allowed: Allowed = Allowed()
    on_resume: OnResume = "must match"

    @property
    def is_group(self) -> bool:
        return dataclasses.is_dataclass(self.type)

    @property
    def type_name(self) -> str:
        """ "float", or "float or None"."""
        return self.type.__name__ + (" or None" if self.optional else "")


def shown(value: Any) -> str:
    """`repr`, in one line and no longer than a message bears."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python prints no integer of more than 4300 digits
        text = "a number of thousands of digits"
    return text if len(text) <= 100 else f"{text[:100]}..."


def setting(default: Any, meaning: str, *, on_resume: OnResume, **allowed: Any) -> Any:
    """A dataclass field with its meaning, what a resume may do with it, and its values in the terms of `Allowed`."""
    metadata = {"meaning": meaning, "on_resume": on_resume, "allowed": Allowed(**allowed)}
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def fields_of(cls: type) -> Mapping[str, FieldInfo]:
    """The fields and groups of one dataclass by name."""
    annotations = typing.get_type_hints(cls)
    infos = {}
    for entry in dataclasses.fields(cls):
        kind, optional = _without_none(annotations[entry.name])
        infos[entry.name] = FieldInfo(kind, optional, entry.default, **entry.metadata)
    return types.MappingProxyType(infos)


def _without_none(annotation: Any) -> tuple[type, bool]:
    """The type itself of `type | None`, and whether None was there."""
    if isinstance(annotation, types.UnionType):
        (kind,) = (member for member in typing.get_args(annotation) if member is not types.NoneType)
        return kind, True
    return annotation, False


def leaf_fields(cls: type) -> dict[str, FieldInfo]:
    """Every field of a dataclass and of the groups in it by dotted path, without the groups themselves."""

    def tree(cls: type) -> dict[str, Any]:
        return {name: tree(info.type) if info.is_group else info for name, info in fields_of(cls).items()}

    return flatten(tree(cls))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested groups as one dict by dotted path: {"outer": {"lr": 0.7}} becomes {"outer.lr": 0.7}."""
    flat = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat
