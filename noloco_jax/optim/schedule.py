"""Schedule of outer steps. Free of jax, since the configuration uses it too."""

import operator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SyncSchedule:
    """Schedule of `fragments` outer steps, evenly spaced, in every `sync_every` inner steps: one for each fragment.

    Attributes:
      sync_every: inner steps from one outer step of a fragment to its next, at least 1. It may be a traced number of
        `optax.inject_hyperparams` if there are neither fragments nor a delay.
      fragments: F, at least 1.
      delay: inner steps from an outer step to its correction, at most `sync_every`; 0: no corrections.

    Raises:
      ValueError: if a number is out of its range.
      TypeError: if `sync_every` is not an integer, or is traced and there are fragments or a delay.
    """

    sync_every: Any
    fragments: int = 1
    delay: int = 0

    def __post_init__(self):
        if self.fragments < 1:
            raise ValueError(f"fragments is {self.fragments}: it must be at least 1")
        try:
            every = operator.index(self.sync_every)
        except TypeError:
            kind = getattr(getattr(self.sync_every, "dtype", None), "kind", None)
            if getattr(self.sync_every, "ndim", None) != 0 or kind not in ("i", "u"):
                raise TypeError(f"sync_every is {self.sync_every!r}: it must be an integer") from None
            if self.fragments > 1 or self.delay:
                raise TypeError(
                    "sync_every is traced, and with fragments or a delay it must be known: name it in the "
                    "static_args of optax.inject_hyperparams"
                ) from None
            return
        if every < 1:
            raise ValueError(f"sync_every is {every}: it must be at least 1")
        if not 0 <= self.delay <= every:
            raise ValueError(
                f"delay={self.delay} is not between 0 and the sync_every={every} inner steps until a fragment's next "
                f"outer step: give {0 if self.delay < 0 else every}"
            )
        object.__setattr__(self, "sync_every", every)  # numpy integers would promote JAX's counters

    @property
    def gap(self) -> float:
        """Return the inner steps between outer steps of any fragment; below 1 if several follow one inner step."""
        return self.sync_every / self.fragments

    @property
    def max_at_once(self) -> int:
        """Return the most outer steps that follow one inner step."""
        return 1 if self.fragments == 1 else -(-self.fragments // self.sync_every)

    def due(self, step: Any) -> Any:
        """Count the outer steps that follow inner step `step` (1, 2, ...); 0 for step 0. Numpy or JAX integers."""
        phase = (step - 1) % self.sync_every
        here = (phase + 1) * self.fragments // self.sync_every - phase * self.fragments // self.sync_every
        has_begun = (abs(step) - abs(step - 1) + 1) // 2  # 1 if step > 0, else 0, without a boolean-to-integer cast
        return here * has_begun

    def on_the_way(self, step: Any) -> Any:
        """Count the outer steps before inner step `step` whose corrections are still pending after it."""
        return sum((self.due(step - back) for back in range(1, self.delay)), start=0 * step)

    def total(self, step: int) -> int:
        """Return the outer steps in the first `step` inner steps."""
        return step * self.fragments // self.sync_every
