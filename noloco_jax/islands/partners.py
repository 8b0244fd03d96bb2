"""Partner of an island in a round: the run's pairing, over the members of the round in the order of their ids."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from noloco_jax.config import TrainConfig
from noloco_jax.methods import method_of


def partner_by(config: TrainConfig) -> Callable[[Sequence[str], int, str], str | None]:
    """Return a function that maps members, an outer step and a name to the name of the partner, or None."""

    def of(active: Sequence[str], round: int, name: str) -> str | None:
        groups, me = _groups(_resized(config, len(active)), round), active.index(name)
        return next((active[i] for i in groups[me] if i != me), None)

    return of


@functools.lru_cache(maxsize=8)
def _resized(config: TrainConfig, count: int) -> TrainConfig:
    """Return the configuration with another number of replicas; pairs of a hypercube need a power of two."""
    order = "passes" if config.outer.order == "hypercube" and count & (count - 1) else config.outer.order
    return replace(config, num_replicas=count, outer=replace(config.outer, order=order))


@functools.lru_cache(maxsize=8)
def _groups(config: TrainConfig, round: int) -> dict[int, tuple[int, ...]]:
    """Map each replica to its group of a round."""
    return {i: group for group in method_of(config).groups(config, round) for i in group}
