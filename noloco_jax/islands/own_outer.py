"""Outer optimizer of a user's own loop: what islands can follow, and what they compare of it."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from noloco_jax.islands.membership import digest, run_identity
from noloco_jax.islands.payload import ArraySpec
from noloco_jax.islands.peers import FIRST_WEIGHTS
from noloco_jax.islands.roster import Roster
from noloco_jax.optim.exchange.mean import MeanExchange
from noloco_jax.optim.fragments import described
from noloco_jax.optim.outer_step import OuterOptimizer
from noloco_jax.optim.pairing import Pairing, RandomPairing, largest_group


def checked_pairing(outer: OuterOptimizer, count: int) -> Pairing:
    """Return the pairing of an outer optimizer; raise `ValueError` where islands cannot follow it."""
    if not isinstance(outer, OuterOptimizer) or not isinstance(outer.steps.exchange, MeanExchange):
        raise ValueError("islands exchange in pairs: give outer=noloco_jax.noloco(...)")
    if outer.steps.schedule.delay:
        raise ValueError(
            f"delay={outer.steps.schedule.delay} is not for islands: leave it out, corrections enter when they arrive"
        )
    pairing: Any = outer.steps.exchange.pairing
    if pairing is None:
        return RandomPairing(count)
    if pairing.num_replicas != count or largest_group(pairing) > 2:
        raise ValueError(
            f"the pairing is of {pairing.num_replicas} replicas in groups of {largest_group(pairing)}, and the roster "
            f"has {count} islands, which exchange in pairs: leave the pairing out"
        )
    return pairing


def identity_of(
    roster: Roster,
    outer: OuterOptimizer,
    pairing: Pairing,
    common: Mapping[str, Any],
    arrays: Mapping[str, ArraySpec],
    first_weights: str,
) -> dict[str, str]:
    """Return the values that all islands of a run must have equal.

    Args:
      roster: the run's islands.
      outer: the outer optimizer.
      pairing: the result of `checked_pairing`.
      common: further values.
      arrays: name -> spec of the state's arrays.
      first_weights: summary of the first weights; empty where they are not compared.
    """
    steps = outer.steps
    values = {f"outer.{field.name}": shown(getattr(steps.rule, field.name)) for field in dataclasses.fields(steps.rule)}  # type: ignore[arg-type]
    values["outer.sync_every"] = str(steps.schedule.sync_every)
    # As far as a few passes of a pool tell.
    draws = [int(pairing.pool_index(draw, 0)) for draw in range(2 * len(pairing.pool))]
    values["outer.pairing"] = digest([pairing.pool, draws])
    values["outer.wire"] = steps.exchange.wire.name  # type: ignore[attr-defined]
    values["outer.fragments"] = described(steps.fragments.count)
    values |= {f"common.{name}": json.dumps(value) for name, value in common.items()}
    values["arrays"] = digest([f"{name} {spec}" for name, spec in arrays.items()])
    return run_identity(roster) | values | ({FIRST_WEIGHTS: first_weights} if first_weights else {})


def shown(value: Any) -> str:
    """Return a setting of the outer optimizer, or some values of its schedule, for islands to compare."""
    if not callable(value):
        return str(value)
    schedule: Callable[[Any], Any] = value
    numbers = (0, 1, 10, 100, 1_000, 10_000)
    return ", ".join(f"{float(schedule(np.int32(number))):.6g} in round {number + 1}" for number in numbers)
