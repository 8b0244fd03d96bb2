"""The table of rules: a new rule gets the whole suite for one row."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import noloco_jax as nj
from support.oracle import diloco_step, noloco_step

ALPHA, BETA, GAMMA = 0.5, 0.7, 0.4


@dataclass(frozen=True)
class RuleCase:
    """A rule as its users make it, and what it computes by numpy.

    Attributes:
      make: (num_replicas, axis_name, **settings) -> the outer optimizer.
      step: (θ, φ, δ, groups) -> (φ, δ), float64, replicas leading.
      bitwise: whether the members of a group hold equal slow weights after every round.
    """

    make: Callable[..., Any]
    step: Callable[..., tuple[np.ndarray, np.ndarray]]
    bitwise: bool


def _noloco(num_replicas: int, axis_name: Any, group_size: int = 2, sync_every: int = 1, **settings: Any) -> Any:
    pairing = nj.RandomPairing(num_replicas, group_size, seed=5)
    return nj.noloco(pairing, BETA, ALPHA, GAMMA, sync_every=sync_every, axis_name=axis_name, **settings)


def _diloco(nesterov: bool, num_replicas: int, axis_name: Any, sync_every: int = 1, **settings: Any) -> Any:
    del num_replicas
    return nj.diloco(BETA, ALPHA, nesterov, sync_every=sync_every, axis_name=axis_name, **settings)


def _noloco_step(theta, phi, delta, groups):
    return noloco_step(theta, phi, delta, groups=groups, alpha=ALPHA, beta=BETA, gamma=GAMMA)


def _corrections_step(theta, phi, delta, groups):
    message = BETA * (theta - phi) + GAMMA * phi
    mean = np.empty_like(message)
    for members in map(list, groups):
        mean[members] = message[members].mean(0)
    return phi + ALPHA * delta + mean - GAMMA * phi, ALPHA * delta + mean - message


def _diloco_step(nesterov, theta, phi, delta, groups):
    del groups
    return diloco_step(theta, phi, delta, alpha=ALPHA, beta=BETA, nesterov=nesterov)


RULES = {
    "noloco": RuleCase(_noloco, _noloco_step, bitwise=False),
    "corrections": RuleCase(functools.partial(_noloco, momentum_of="corrections"), _corrections_step, bitwise=False),
    "diloco": RuleCase(functools.partial(_diloco, False), functools.partial(_diloco_step, False), bitwise=True),
    "nesterov": RuleCase(functools.partial(_diloco, True), functools.partial(_diloco_step, True), bitwise=True),
}


def groups_of(num_replicas: int, draw: int, fragment: int = 0) -> Any:
    """Return the groups of a draw of the table's noloco."""
    pairing = nj.RandomPairing(num_replicas, seed=5)
    return pairing.pool[int(pairing.pool_index(draw, fragment))]
