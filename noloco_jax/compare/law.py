"""Power law of the gap against how often a weight is averaged: gap = a (meetings / 100)^-b."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from noloco_jax.compare.plan import Plan
from noloco_jax.compare.rows import Row, mean_and_std
from noloco_jax.compare.variants import Choices, Variant
from noloco_jax.config import TrainConfig
from noloco_jax.train.messages import num_outer_steps

_FREQUENCY = {"num_steps", "outer.sync_every"}  # fields that change little but the number of meetings
_WITH_LENGTH = {"checkpoint_every", "eval_every", "inner.warmup_steps"}  # fields that go along with num_steps
_UNIT = 100  # meetings
_LEAST = 4  # points: two parameters, their error, and one to predict


@dataclass(frozen=True)
class Law:
    """A power law that was fitted to the rows of a variant.

    Attributes:
      title: the variant's, with its values of the fields that vary otherwise.
      rows: those with a gap above zero, which has a logarithm.
      meetings: outer steps of a weight in a row's whole run.
      gaps: percent, the mean over the seeds.
      at_unit: the gap at `_UNIT` meetings, in percent.
      power: b.
      power_error: its standard error.
      worst: by which factor a point is off at most when the law is fitted to the others.
    """

    title: str
    rows: Sequence[Row]
    meetings: np.ndarray
    gaps: np.ndarray
    at_unit: float
    power: float
    power_error: float
    worst: float

    def predict(self, meetings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the gap after so many meetings in percent, and the factor that a new point is within at 1 sigma."""
        x, logs = np.log(self.meetings / _UNIT), np.log(self.gaps)
        values = _log_gap(x, logs, at := np.log(meetings / _UNIT))
        variance = ((logs - _log_gap(x, logs, x)) ** 2).sum() / (len(x) - 2)
        reach = 1 + 1 / len(x) + (at - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum()
        return np.exp(values), np.exp(np.sqrt(variance * reach))

    def __str__(self) -> str:
        return (
            f"{self.title}: gap = {self.at_unit:.3g} % x (meetings of a weight / {_UNIT})^-b with b = "
            f"{self.power:.2f} ± {self.power_error:.2f}, fitted to {len(self.rows)} rows; each is predicted by the "
            f"others within a factor of {self.worst:.2f}"
        )


def num_meetings(config: TrainConfig) -> float:
    """Return how often a weight is averaged with others in a whole run."""
    return num_outer_steps(config) / config.outer.fragments


def fit_laws(rows: Sequence[Row]) -> list[Law]:
    """Fit a law to the rows of every variant that differ in their length or in how often they meet alone.

    Rows whose gap is not above zero are left out: nothing is left of it there that a law of this form could tell. So
    are variants with fewer than four others, or whose gap does not fall.
    """
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if num_meetings(row.runs[0].config) and 0 < mean_and_std(row.figures["gap_percent"])[0] < math.inf:
            groups.setdefault(_group(row.variant), []).append(row)
    laws = (_fit(_title(group[0].variant), group) for group in groups.values())
    return [law for law in laws if law is not None]


def predictions(plan: Plan, rows: Sequence[Row], laws: Sequence[Law]) -> Iterator[str]:
    """Say what the laws expect of the variants without a finished run."""
    finished = {row.variant for row in rows}
    of_group = {_group(law.rows[0].variant): law for law in laws}
    for variant in plan.variants:
        law = of_group.get(_group(variant))
        if law is not None and variant not in finished:
            meetings = num_meetings(plan.runs_of(variant, plan.seeds[0])[0].config)
            gap, factor = law.predict(np.array(meetings))
            yield f"{variant.name}: +{gap:.1f} % ({gap / factor:.1f} to {gap * factor:.1f})"


def _is_frequency(fields: set[str]) -> bool:
    """Return True if fields that vary together change little but the number of meetings."""
    return bool(fields & _FREQUENCY) and fields <= _FREQUENCY | _WITH_LENGTH


def _group(variant: Variant) -> tuple[str, tuple[tuple[Choices, str], ...]]:
    """Return a variant's title, and its values of the varied fields that change more than the number of meetings."""
    return variant.title, tuple(pair for pair in variant.values if not _is_frequency(set(pair[0].fields)))


def _title(variant: Variant) -> str:
    title, values = _group(variant)
    return " ".join([title, *(f"{choices.title()}={choices.title(value)}" for choices, value in values)])


def _fit(title: str, rows: Sequence[Row]) -> Law | None:
    meetings = np.array([num_meetings(row.runs[0].config) for row in rows])
    gaps = np.array([mean_and_std(row.figures["gap_percent"])[0] for row in rows])
    x, logs = np.log(meetings / _UNIT), np.log(gaps)
    if len(rows) < _LEAST or len(np.unique(x)) < _LEAST - 1:
        return None
    at_unit, at_next = _log_gap(x, logs, np.array([0.0, 1.0]))
    power = float(at_unit - at_next)
    if power <= 0:
        return None
    residuals = logs - _log_gap(x, logs, x)
    error = math.sqrt((residuals**2).sum() / (len(x) - 2) / ((x - x.mean()) ** 2).sum())
    left_out = (np.arange(len(x)) != index for index in range(len(x)))
    off = [abs(logs[~others] - _log_gap(x[others], logs[others], x[~others]))[0] for others in left_out]
    return Law(title, rows, meetings, gaps, math.exp(at_unit), power, error, math.exp(max(off)))


def _log_gap(x: np.ndarray, logs: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return the values at `at` of the line that is nearest to (x, logs)."""
    return np.polynomial.Polynomial.fit(x, logs, 1)(at)
