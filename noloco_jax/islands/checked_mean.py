"""Mean of islands' last weights, without those that are out of line: for the final merge and `island merge`.

No rule proves weights honest, but wrong ones that are large would destroy the mean. Three islands or more are compared
with their coordinatewise median, which fewer than half of them cannot move far. The rule is symmetric: all islands that
merge the same weights leave the same ones out, and get the same bits. Of two, one's own weights are the reference.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

FAR_WEIGHTS = 8.0  # largest distance from the own weights, in multiples of their norm
# Largest distance from the median of three or more: the larger one of both. In a run of the quickstart, islands of one
# round are 0.03 norms from it, one that is half a run behind 0.4, and one of the first rounds 0.7.
FAR_FROM_MEDIAN = 2.0  # in multiples of the median's norm
SPREADS = 8.0  # in multiples of the others' median distance from it, as weights that began at zero may be far apart
_CHUNK = 1 << 16  # values of each island at once: they stay in the processor's cache

Arrays = Sequence[np.ndarray]


class CheckedMean(NamedTuple):
    """Mean of islands' weights.

    Attributes:
      arrays: the mean, in float32; empty if nobody's weights are left.
      left_out: island that is not in the mean -> the reason.
      is_undecided: True if two islands disagree and none of them is known to be right.
    """

    arrays: list[np.ndarray]
    left_out: dict[str, str]
    is_undecided: bool = False


def checked_mean(weights: Mapping[str, Arrays], own: str | None = None) -> CheckedMean:
    """Average weights, except those that are not finite or out of line with the others.

    Args:
      weights: island -> its arrays, of equal shapes for all, in the order in which they are added up.
      own: the island whose weights are the reference if only two have finite ones; None: there is none.
    """
    left_out = {name: "its weights are not finite" for name, arrays in weights.items() if not _is_finite(arrays)}
    names = [name for name in weights if name not in left_out]
    if len(names) > 2:
        distances, norm = _from_median([weights[name] for name in names])
        for number, (name, distance) in enumerate(zip(names, distances, strict=True)):
            others = statistics.median_low(distances[:number] + distances[number + 1 :])
            if not distance <= max(FAR_FROM_MEDIAN * norm, SPREADS * others):
                left_out[name] = f"its weights are {_ratio(distance, norm):.3g} norms away from the median of all"
    elif len(names) == 2:
        one, other = sorted(names, key=lambda name: name != own)
        there = apart(weights[one], weights[other])
        if own == one and not there <= FAR_WEIGHTS:
            left_out[other] = f"its weights are {there:.3g} norms away from those of {own}"
        elif own != one and not (distance := max(there, apart(weights[other], weights[one]))) <= FAR_WEIGHTS:
            reason = f"the weights of {one} and {other} are {distance:.3g} norms apart: which are wrong is not known"
            return CheckedMean([], left_out | dict.fromkeys(names, reason), is_undecided=True)
    names = [name for name in names if name not in left_out]
    return CheckedMean(_mean([weights[name] for name in names]), left_out)


def apart(reference: Arrays, other: Arrays) -> float:
    """Return the distance of weights from a reference, in multiples of the reference's norm."""
    distance = norm = 0.0
    for one, another in _chunks([reference, other]):
        with np.errstate(over="ignore"):
            norm += _square(one)
            distance += _square(another - one)
    return _ratio(distance**0.5, norm**0.5)


def _from_median(weights: Sequence[Arrays]) -> tuple[list[float], float]:
    """Return the distance of each island's weights from the coordinatewise median of all, and the median's norm."""
    squares, norm = [0.0] * len(weights), 0.0
    for values_IC in _chunks(weights):
        median_C = _median(values_IC)
        norm += _square(median_C)
        with np.errstate(over="ignore"):
            for number, values_C in enumerate(values_IC):
                squares[number] += _square(values_C - median_C)
    return [square**0.5 for square in squares], norm**0.5


def _median(values_IC: Sequence[np.ndarray]) -> np.ndarray:
    """Return the median over islands. Sorting whole rows takes a twentieth of `np.median`'s time for few islands."""
    rows = list(values_IC)
    for number in range(len(rows)):
        for i in range(number % 2, len(rows) - 1, 2):
            rows[i], rows[i + 1] = np.minimum(rows[i], rows[i + 1]), np.maximum(rows[i], rows[i + 1])
    return rows[(len(rows) - 1) // 2] / 2 + rows[len(rows) // 2] / 2


def _chunks(weights: Sequence[Arrays]) -> Iterator[list[np.ndarray]]:
    """Yield the same values of each island, in float32."""
    for arrays in zip(*weights, strict=True):
        flat = [x.reshape(-1) for x in arrays]
        for start in range(0, flat[0].size, _CHUNK):
            yield [x[start : start + _CHUNK].astype(np.float32, copy=False) for x in flat]


def _square(x: np.ndarray) -> float:
    return float(np.dot(x, x))  # infinite where it overflows, which is far


def _ratio(distance: float, norm: float) -> float:
    return distance / norm if norm else float("inf") if distance else 0.0


def _is_finite(arrays: Arrays) -> bool:
    return all(np.isfinite(x.astype(np.float32, copy=False)).all() for x in arrays)


def _mean(weights: Sequence[Arrays]) -> list[np.ndarray]:
    """Return the mean in float32, added up in the order given."""
    means = []
    for arrays in zip(*weights, strict=True):
        total = np.zeros(arrays[0].shape, np.float32)
        for x in arrays:
            total += x.reshape(total.shape)
        means.append(total / np.float32(len(arrays)))
    return means
