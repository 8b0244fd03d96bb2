"""A rule and an exchange as one Optax transform, and as an outer step in a program of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import optax

from noloco_jax.outer.counters import shared
from noloco_jax.outer.misuse import check_params, check_surroundings
from noloco_jax.outer.rule import Exchange, OuterState, Rule, computed, outer_step

PyTree = Any


class OuterOptimizer(optax.GradientTransformationExtraArgs):
    """An Optax transform that also offers its outer step by itself.

    Attributes:
      init: params -> `OuterState`.
      update: see `noloco`.
      step: (params, state) -> (params, state): one outer step, for a program of its own. It counts rounds by itself.
      rule: what a replica does in an outer step.
    """

    step: Callable[[PyTree, OuterState], tuple[PyTree, OuterState]]
    rule: Rule

    def __new__(cls, init: Any, update: Any, step: Any, rule: Any) -> "OuterOptimizer":
        made = super().__new__(cls, init, update)
        made.step, made.rule = step, rule
        return made


def outer_optimizer(rule: Rule, exchange: Exchange, sync_every: Any, axis_names: Sequence[str]) -> OuterOptimizer:
    """The transform that lets `sync_every` - 1 updates pass and lands the next one on an outer step's result.

    Args:
      rule: what a replica does.
      exchange: how it hears of the others.
      sync_every: inner steps between outer steps, at least 1.
      axis_names: the axes of replicas.
    """

    def init_fn(params: PyTree) -> OuterState:
        return OuterState(jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32), rule.init(params))

    def step_fn(params: PyTree, state: OuterState) -> tuple[PyTree, OuterState]:
        check_params(params, axis_names)
        theta, new = outer_step(rule, exchange, params, state._replace(round=shared(state.round)))
        # A caller may donate parameters and state, so they must not be one buffer.
        params = jax.tree.map(lambda x, p: jnp.array(x, p.dtype, copy=True), theta, params)
        return params, new._replace(round=state.round + 1)

    def update_fn(
        updates: PyTree,
        state: Any,  # an OuterState; Optax's own type admits any tree
        params: PyTree | None = None,
        *,
        sync: bool | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, OuterState]:
        del extra_args
        if params is None:
            raise ValueError("the outer update needs the parameters: call update(updates, state, params)")
        if isinstance(sync, jax.core.Tracer):
            raise TypeError("sync is traced: give True or False, for two programs, or None to go by the counter")
        check_surroundings()
        check_params(params, axis_names)
        state = state._replace(count=jnp.asarray(optax.safe_increment(state.count)))
        if sync is not None and not sync:
            return updates, state

        def skip(updates: PyTree, round: jax.Array, rule_state: PyTree) -> tuple[PyTree, PyTree]:
            del round
            return updates, rule_state

        def land(updates: PyTree, round: jax.Array, rule_state: PyTree) -> tuple[PyTree, PyTree]:
            before = state._replace(round=round, rule=rule_state)
            theta, after = outer_step(rule, exchange, _moved(params, updates), before)
            landing = jax.tree.map(lambda u, th, p: (th - p).astype(u.dtype), updates, theta, computed(params))
            return landing, after.rule

        operands = updates, shared(state.round), state.rule
        if sync is not None:
            updates, rule_state = land(*operands)
            return updates, state._replace(round=state.round + 1, rule=rule_state)
        is_due = shared(state.count) % sync_every == 0
        updates, rule_state = jax.lax.cond(is_due, land, skip, *operands)
        return updates, state._replace(round=state.round + is_due, rule=rule_state)

    return OuterOptimizer(init_fn, update_fn, step_fn, rule)


def _moved(params: PyTree, updates: PyTree) -> PyTree:
    """θ: the parameters after the inner optimizer's updates."""
    return optax.apply_updates(params, updates)
