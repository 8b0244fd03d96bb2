"""Communication graphs of Epidemic Learning: random, directed, with equal in- and out-degree for all replicas."""

import itertools
import math
import operator
from typing import Any, SupportsIndex

from noloco_jax.optim.pairing import DRAWS, MAX_POOL, Round, check_draws, drawn
from noloco_jax.optim.prng import POOL, permutation


class RandomNeighbours:
    """Random s-regular directed graphs: each round a replica receives from `degree` others and sends to as many.

    This is EL-Oracle. Replica i receives from i + r (mod N) for the `degree` shifts r that the round draws from
    1, ..., N − 1. These are few of all s-regular graphs but mix like all of them: every other replica is an equally
    likely sender, and so is any pair of them. A round therefore multiplies the replicas' variance around their mean by
    (1 − s / (N − 1)) / (s + 1), the paper's β_s of EL-Oracle. Each shift is one compiled permutation. A compiled
    program can hold neither fresh graphs nor those of EL-Local, where a replica receives from none or from many.

    Attributes:
      pool: graphs, each as N tuples: replica i and its senders. The k-th entries form a permutation.
      is_directed: True; see `pairing.senders_of`.

    Args:
      num_replicas: N.
      degree: s, from 1 to N − 1 (1 replica: any); None: log2 N, rounded up, as in the paper's experiments.
      seed: seed of the draws, and of the pool if that is a sample; any non-negative integer.
      order: as for `RandomPairing`.
      max_pool: size limit of the pool. It holds all choices of shifts if they fit, else a sample of this size in which
        each shift occurs about equally often.

    Raises:
      ValueError: if the sizes do not fit, or the order is unknown.
    """

    is_directed = True

    def __init__(
        self,
        num_replicas: SupportsIndex,
        degree: SupportsIndex | None = None,
        seed: SupportsIndex = 0,
        order: str = "passes",
        *,
        max_pool: SupportsIndex = MAX_POOL,
    ):
        num_replicas, seed, max_pool = map(operator.index, (num_replicas, seed, max_pool))  # NumPy's too
        degree = None if degree is None else operator.index(degree)
        if num_replicas < 1:
            raise ValueError(f"num_replicas is {num_replicas}: it must be at least 1")
        if num_replicas > 1 and degree is not None and not 1 <= degree < num_replicas:
            raise ValueError(
                f"degree is {degree} with num_replicas {num_replicas}: choose from 1 to {num_replicas - 1}"
            )
        check_draws(seed, order, DRAWS, max_pool)
        self.num_replicas = num_replicas
        self.degree = (num_replicas - 1).bit_length() if degree is None or num_replicas == 1 else degree
        self.seed = seed
        self.order = order
        self.pool: tuple[Round, ...] = tuple(
            tuple((i, *((i + shift) % num_replicas for shift in shifts)) for i in range(num_replicas))
            for shifts in _choices(num_replicas - 1, self.degree, seed, max_pool)
        )

    def pool_index(self, draw: Any, fragment: Any = 0) -> Any:
        """Return the index in `pool` of a draw (0, 1, ...) of a fragment; see `Pairing`."""
        return drawn(len(self.pool), self.seed, self.order, draw, fragment)


def _choices(number: int, size: int, seed: int, max_pool: int) -> tuple[tuple[int, ...], ...]:
    """Return distinct `size`-subsets of 1..`number`, each ascending: all of them, or `max_pool`."""
    if math.comb(number, size) <= max_pool:
        return tuple(itertools.combinations(range(1, number + 1), size))
    found: dict[tuple[int, ...], None] = {}
    for sweep in itertools.count():  # each sweep goes through all numbers in a new order
        order = permutation(number, seed, POOL, size, sweep) + 1
        for start in range(0, number - size + 1, size):
            found.setdefault(tuple(sorted(order[start : start + size].tolist())))
            if len(found) == max_pool:
                return tuple(found)
    raise AssertionError("sweeps do not end")
