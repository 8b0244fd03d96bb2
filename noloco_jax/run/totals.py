"""What a run has come to since its first start: kept in its checkpoints, so that figures go on where a run goes on."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Totals:
    """Sums over the steps of a run, in all its starts. What a killed run did after its last checkpoint is not in them.

    Attributes:
      tokens: trained on by all replicas together.
      bytes_sent_total: by a replica to other replicas, in the mean, see `messages`.
      seconds: of training, evaluating and saving.
      seconds_waiting_for_data: of those, until batches were there: what data may cost at most, as devices have a step
        to do meanwhile.
      seconds_in_outer_steps: of those, in outer steps.
    """

    tokens: int = 0
    bytes_sent_total: int | float = 0
    seconds: float = 0.0
    seconds_waiting_for_data: float = 0.0
    seconds_in_outer_steps: float = 0.0

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Totals":
        """Of what a checkpoint holds."""
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    def to_json(self) -> dict[str, int | float]:
        return asdict(self)

    @classmethod
    def of_all(cls, parts: Sequence["Totals"]) -> "Totals":
        """Of replicas that have trained side by side, each with totals of its own."""
        longest = {name: max(getattr(part, name) for part in parts) for name in parts[0].to_json()}
        sent = sum(part.bytes_sent_total for part in parts) / len(parts)
        return cls(**longest | {"tokens": sum(part.tokens for part in parts), "bytes_sent_total": sent})

    def of_each(self, num_replicas: int) -> "Totals":
        """Of each replica alone: all have trained on as many tokens."""
        return replace(self, tokens=self.tokens // num_replicas)

    def plus(self, **values: int | float) -> "Totals":
        """The same with more of some."""
        return replace(self, **{name: getattr(self, name) + value for name, value in values.items()})


class Clock:
    """The seconds of a run: those before its present start, and those since."""

    def __init__(self, before: float, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._start = clock, clock() - before

    def seconds(self) -> float:
        return self._clock() - self._start


def wall_clock() -> str:
    """The time of day, as other records of a run have it: 2026-11-22T12:00:00+0000."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
