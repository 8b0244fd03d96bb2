"""Partner of an island in a round: the run's pairing, over the members of the round in the order of their ids."""

import functools
from collections.abc import Callable, Sequence

from noloco_jax.optim.pairing import Pairing, RandomPairing


def partner_by(pairing: Pairing, num_fragments: int) -> Callable[[Sequence[str], int, str], str | None]:
    """Return a function that maps members, an outer step and a name to the name of the partner, or None."""

    def of(active: Sequence[str], round: int, name: str) -> str | None:
        sized, me = _resized(pairing, len(active)), active.index(name)
        draw, fragment = divmod(round, num_fragments)
        groups = sized.pool[int(sized.pool_index(draw, fragment))]
        return next((active[i] for group in groups if me in group for i in group if i != me), None)

    return of


@functools.lru_cache(maxsize=8)
def _resized(pairing: Pairing, count: int) -> Pairing:
    """Return the pairing of another number of islands, as members come and go: random pairs of the same seed.

    Pairs of a hypercube need a power of two.
    """
    if pairing.num_replicas == count:
        return pairing
    if not isinstance(pairing, RandomPairing):
        return RandomPairing(count)
    order = "passes" if pairing.order == "hypercube" and count & (count - 1) else pairing.order
    return RandomPairing(count, seed=pairing.seed, order=order)
