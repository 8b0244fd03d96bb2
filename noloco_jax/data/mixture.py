"""A mixture of sources: the configuration of each, and the order in which sequences are drawn from them."""

import itertools
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from noloco_jax.data.source import GOLDEN_STEP

if TYPE_CHECKING:
    from noloco_jax.config import DataConfig

_MIXTURE = "data.mixture."
_SPAN = 2**64


class Mixture:
    """A fixed order of sources in which each has its share of the places.

    Place k belongs to the source in whose part of [0, 1) the point k times the golden ratio modulo 1 lies. Each point
    falls into one of the largest gaps that those before it left (Knuth, The Art of Computer Programming, volume 3,
    section 6.4), so that any consecutive places, wherever they begin, have every source in its share but for a few.
    Nothing but k has to be remembered, and the weights may change at any place.
    """

    def __init__(self, weights: Mapping[str, float]):
        total = sum(map(Fraction, weights.values()))
        self.shares = {name: float(Fraction(weight) / total) for name, weight in weights.items()}
        self._names = tuple(weights)
        ends = itertools.accumulate(map(Fraction, weights.values()))
        self._ends = [int(_SPAN * end / total) for end in ends][:-1]

    def source_at(self, place: int) -> str:
        """Return the name of the source of the sequence at `place`, counted from 0."""
        return self._names[bisect_right(self._ends, place * GOLDEN_STEP % _SPAN)]


def configs_by_source(config: "DataConfig") -> dict[str, "DataConfig"]:
    """Return each source's configuration as if it were the only one, by the group of its fields: "data.mixture.web".

    The only one itself is "data".
    """
    if config.kind != "mixture":
        return {"data": config}
    return {
        f"{_MIXTURE}{name}": replace(
            config,
            kind=source.kind,
            path=source.path,
            validation_path=source.validation_path,
            text_column=source.text_column,
        )
        for name, source in config.mixture.items()
    }


def mixture_of(config: "DataConfig") -> Mixture:
    """Return the order of the sources, with the keys of `configs_by_source`."""
    if config.kind != "mixture":
        return Mixture({"data": 1.0})
    return Mixture({f"{_MIXTURE}{name}": source.weight for name, source in config.mixture.items()})


def source_name(group: str) -> str:
    """Return the name in `data.mixture` of the source with the fields of `group`."""
    return group.removeprefix(_MIXTURE)
