"""A tape of faults as a Poisson process draws them, the same for a seed whatever is struck by it."""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

KINDS = ("kill", "kill", "stop", "partition")  # a kill is as frequent as all others together
_HOUR = 3600.0
_MEAN_SECONDS = {"kill": 60.0, "stop": 60.0, "partition": 120.0}  # for which a victim is away, at least


class Strike(NamedTuple):
    """A fault.

    Attributes:
      at: seconds from the beginning.
      kind: "kill": a process ends and is started again; "stop": it is stopped and goes on; "partition": the victims
        and the others do not hear each other.
      victims: one, but for a partition up to half of all.
      seconds: that it lasts, to which a killed process's start comes.
    """

    at: float
    kind: str
    victims: tuple[str, ...]
    seconds: float


def tape(names: Sequence[str], per_hour: float, compression: float, seed: int) -> Iterator[Strike]:
    """Faults without end.

    Args:
      names: who may be struck.
      per_hour: faults an hour, of all together.
      compression: seconds that pass in one of this tape's: rates are as many times higher, durations shorter.
      seed: of the draws.
    """
    rng = random.Random(seed)
    now = 0.0
    while per_hour > 0:
        now += rng.expovariate(per_hour * compression / _HOUR)
        kind = rng.choice(KINDS)
        count = rng.randint(1, len(names) // 2) if kind == "partition" else 1
        victims = tuple(rng.sample(list(names), count))
        yield Strike(now, kind, victims, rng.expovariate(1 / _MEAN_SECONDS[kind]) / compression)
