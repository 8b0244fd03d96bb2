"""History of a run for a page's charts: a few figures of every island, at times common to all. Needs no jax."""

from collections.abc import Mapping, Sequence
from typing import Any

_MOST, _LEAST, _ALL = 600, 60, 60_000  # samples of an island, and of all islands

Values = Sequence[float | None]


class History:
    """Samples of islands, from the first one on: as they become too many, every second one is dropped.

    Args:
      names: of the figures of a sample.
    """

    def __init__(self, *names: str):
        self._names = names
        self._times: list[float] = []
        self._islands: dict[str, list[Values]] = {}
        self._gap = 1  # calls of `add` from one sample to the next
        self._calls = 0

    def add(self, now: float, samples: Mapping[str, Values]) -> None:
        """Add a sample of each island; those that are missing, or None in it, are unknown."""
        self._calls += 1
        if (self._calls - 1) % self._gap:
            return
        unknown = (None,) * len(self._names)
        for name in samples.keys() - self._islands.keys():
            self._islands[name] = [unknown] * len(self._times)
        self._times.append(now)
        for name, kept in self._islands.items():
            kept.append(samples.get(name, unknown))
        if len(self._times) >= min(_MOST, max(_LEAST, _ALL // max(len(self._islands), 1))):
            self._times = self._times[::2]
            self._islands = {name: kept[::2] for name, kept in self._islands.items()}
            self._gap *= 2

    def to_json(self) -> dict[str, Any]:
        """Return the times, and of each island a list for each figure."""
        islands = {
            name: dict(zip(self._names, zip(*kept, strict=True), strict=False)) for name, kept in self._islands.items()
        }
        return {"times": self._times, "islands": islands}
