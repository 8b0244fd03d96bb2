"""Values that config fields take in turn, as `--vary` and `--tune` of the tools name them."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from noloco_jax.config import find_field, unknown_field
from noloco_jax.errors import UserError


@dataclass(frozen=True)
class Sweep:
    """Values that a field takes in turn, or several fields together.

    Attributes:
      fields: dotted names; results go by the first.
      values: a text for each field, for each choice.
    """

    fields: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]

    @property
    def title(self) -> str:
        return self.fields[0]


def parse_sweep(text: str, flag: str) -> Sweep:
    """Parse "outer.sync_every=25,50" or "num_steps/eval_every=600/150,2400/600"; the configuration checks values."""
    left, equals, right = text.partition("=")
    fields = tuple(left.split("/"))
    values = tuple(tuple(value.strip().split("/")) for value in right.split(","))
    if not equals or not all(all(value) for value in values):
        raise UserError(f"{flag}={text} is not of the form FIELD=VALUE,VALUE, such as outer.sync_every=25,50")
    for field in fields:
        check_single(field)
    if any(len(value) != len(fields) for value in values):
        raise UserError(f"{flag}={text}: give every choice a value for each of {' and '.join(fields)}")
    if len(set(values)) < len(values):
        raise UserError(f"{flag}={text} has a value twice: give each once")
    return Sweep(fields, values)


def check_single(field: str) -> None:
    """Raise `UserError` unless a dotted name is that of a single field."""
    if find_field(field).is_group:
        raise unknown_field(field)


def check_given_once(choices: Sequence[Sweep], flags: str) -> None:
    """Raise `UserError` if a field is in several choices of these flags."""
    fields = [field for one in choices for field in one.fields]
    for field in fields:
        if fields.count(field) > 1:
            raise UserError(f"{flags} have {field} twice: give all its values once")


def combinations(choices: Sequence[Sweep]) -> Iterator[tuple[tuple[Sweep, tuple[str, ...]], ...]]:
    """Yield every combination of the choices' values, as (choices, value) pairs; the last varies fastest."""
    for values in itertools.product(*(one.values for one in choices)):
        yield tuple(zip(choices, values, strict=True))
