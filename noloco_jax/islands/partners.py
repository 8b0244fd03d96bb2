"""Pairing of the islands that are active in a round: the run's pairing, over their places in the order of their ids."""

import functools
from collections.abc import Callable
from dataclasses import replace

from noloco_jax.config import TrainConfig
from noloco_jax.islands.protocol.members import Members
from noloco_jax.methods import method_of


def partner_in(members: Members, name: str, config: TrainConfig) -> Callable[[int], str | None]:
    """Return a function that maps an outer step to the name of the island's partner in it, or None.

    It follows `members`: islands that know the same members of a round pair alike.
    """

    def of(round: int) -> str | None:
        active = members.active(round)
        if len(active) < 2 or name not in active:
            return None
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
