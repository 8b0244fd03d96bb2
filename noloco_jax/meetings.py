"""When the replicas of a run meet: no jax here, as the configuration asks too."""

import operator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Meetings:
    """`fragments` outer steps, evenly, in every `sync_every` inner steps, so that each fragment has one in them.

    Attributes:
      pieces: (first, sync_every) with ascending `first`, of which the first is 0: from inner step `first` + 1 on an
        outer step of every fragment falls into every `sync_every` inner steps.
      fragments: F, at least 1.
      delay: inner steps from an outer step to its correction; 0: it needs none.
    """

    pieces: tuple[tuple[int, int], ...]
    fragments: int = 1
    delay: int = 0

    @classmethod
    def every(cls, sync_every: Any, fragments: int = 1, delay: int = 0) -> "Meetings":
        """The meetings of a number of inner steps between them, or of pieces.

        Raises:
          ValueError: if a number is out of its range.
          TypeError: if a number of inner steps is traced, and there are fragments or a delay.
        """
        try:
            pieces = ((0, operator.index(sync_every)),)
        except TypeError:
            if getattr(sync_every, "ndim", None) == 0:  # a traced number of optax.inject_hyperparams
                if fragments > 1 or delay:
                    raise TypeError(
                        "sync_every is traced, and with fragments or a delay it must be known: name it in the "
                        "static_args of optax.inject_hyperparams"
                    ) from None
                return cls(((0, sync_every),))
            pieces = tuple((int(a), int(b)) for a, b in sync_every)
        starts = [first for first, _ in pieces]
        if any(every < 1 for _, every in pieces) or not pieces:
            raise ValueError(f"sync_every is {sync_every}: it must be at least 1")
        if starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(f"sync_every is {sync_every}: its pieces must begin with inner step 0 and ascend")
        if fragments < 1:
            raise ValueError(f"fragments is {fragments}: it must be at least 1")
        shortest = min(every for _, every in pieces)
        if not 0 <= delay <= shortest:
            raise ValueError(f"delay is {delay}: it must be between 0 and sync_every, {shortest}")
        return cls(pieces, fragments, delay)

    @property
    def shortest_gap(self) -> float:
        """Inner steps between outer steps, where they are closest; below 1 where several follow one inner step."""
        return min(every for _, every in self.pieces) / self.fragments

    @property
    def most(self) -> int:
        """The most outer steps that follow one inner step."""
        if self.fragments == 1:
            return 1
        return max(-(-self.fragments // every) for _, every in self.pieces)

    def due(self, step: Any) -> Any:
        """Outer steps that follow inner step `step` (1, 2, ...), 0 before the first: integers, of numpy or of JAX."""
        count = 0 * step
        for first, every in self.pieces:
            phase = (step - first - 1) % every
            here = (phase + 1) * self.fragments // every - phase * self.fragments // every
            past = step - first
            since = (abs(past) - abs(past - 1) + 1) // 2  # 1 where past > 0, else 0; no boolean becomes a number
            count = count * (1 - since) + here * since
        return count

    def interval(self, step: int) -> int:
        """Inner steps from one outer step of a fragment to its next, as they are at inner step `step` (1, 2, ...)."""
        return next(every for first, every in reversed(self.pieces) if step > first)

    def on_the_way(self, step: Any) -> Any:
        """Outer steps before inner step `step` whose corrections do not enter by then."""
        return sum((self.due(step - back) for back in range(1, self.delay)), start=0 * step)

    def total(self, step: int) -> int:
        """Outer steps in the first `step` inner steps."""
        ends = [*(first for first, _ in self.pieces[1:]), step]
        return sum(
            max(min(end, step) - first, 0) * self.fragments // every
            for (first, every), end in zip(self.pieces, ends, strict=True)
        )


# Fragments draw their groups independently: each counts its rounds from a multiple of this. No run has as many.
_ROUNDS = 2**20


def own_round(number: Any, fragments: int) -> Any:
    """The round of its fragment that outer step `number` is."""
    return number // fragments


def pairing_round(number: Any, fragments: int) -> Any:
    """The round of a pairing by which outer step `number` meets: every fragment has draws of its own."""
    return number % fragments * _ROUNDS + number // fragments
