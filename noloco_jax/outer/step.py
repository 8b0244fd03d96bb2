"""Outer steps of one fragment of the parameters, with a correction that may be delayed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from noloco_jax.outer.fragments import Fragments
from noloco_jax.outer.rule import Exchange, OuterState, Rule, computed
from noloco_jax.schedule import own_round, pairing_round

PyTree = Any


class Late(NamedTuple):
    """State of a rule whose corrections are applied some inner steps after the solo step.

    Attributes:
      entered: int32 scalar, number of corrections applied, in the order of their outer steps: at most the outer steps
        taken, at least all but the last one of every fragment. Equal on every replica.
      rule: the rule's own state.
      correction: c = mean − m of the last outer step of every fragment, of the parameters' shapes.
    """

    entered: Any
    rule: Any
    correction: PyTree


class Outgoing(NamedTuple):
    """Outgoing data of a fragment in an outer step; each field is a tree like the fragment's parameters.

    Attributes:
      message: m, in its compute precision.
      movement: movement of every number since the replica's last exchange; None without windows.
      windows: the fragment's part of `OuterState.windows`; None for an exchange that keeps none.
    """

    message: PyTree
    movement: PyTree
    windows: PyTree


@dataclass(frozen=True)
class OuterSteps:
    """Outer steps of a rule over an exchange, in fragments and with optional delay.

    Attributes:
      rule: update of a replica, applied to the fragment alone.
      exchange: averaging of messages over the group.
      fragments: cut of the parameters into fragments.
      is_late: make `step` the solo step, and apply the group's mean in `correct`.
      windows: (parameters, dimension along which fragments cut each) -> initial `OuterState.windows`; None for an
        exchange that keeps none.
    """

    rule: Rule
    exchange: Exchange
    fragments: Fragments
    is_late: bool = False
    windows: Callable[[PyTree, PyTree], PyTree] | None = None

    def init(self, params: PyTree) -> OuterState:
        """Return the state before the first round."""
        windows = None if self.windows is None else self.windows(params, self.fragments.cuts(params))
        return OuterState(jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32), self.init_rule(params), windows)

    def init_rule(self, params: PyTree) -> PyTree:
        """Return the `OuterState.rule` before the first round."""
        state = self.rule.init(params)
        if not self.is_late:
            return state
        return Late(jnp.zeros([], jnp.int32), state, jax.tree.map(jnp.zeros_like, computed(params)))

    def step(self, params: PyTree, state: OuterState) -> tuple[PyTree, OuterState]:
        """Take outer step `state.round`.

        Returns:
          The fragment's new parameters in their compute precision, and the state; its counters are left to the caller.
        """
        number = state.round
        if self.is_late:
            theta, state, outgoing = self.solo(params, state)
            return theta, self.keep(state, *self.correction(outgoing, number), number)
        part, rule = self._part(params, state.rule, number)
        theta, round = computed(part), own_round(number, self.fragments.count)
        outgoing = self._outgoing(rule, theta, state, params)
        mean, windows = self._mean(outgoing, number, self.fragments.hidden(part))
        theta, rule = self.rule.receive(rule, outgoing.message, mean, round)
        state = state._replace(rule=self._with(params, state.rule, rule, number))
        return theta, self.with_windows(state, windows, params, number)

    def solo(self, params: PyTree, state: OuterState) -> tuple[PyTree, OuterState, Outgoing]:
        """Take outer step `state.round` as a solo step: results as of `step`, and the data to send to others."""
        number = state.round
        part, held = self._part(params, state.rule, number)
        if self.is_late:  # the state holds one correction a fragment, so the previous one is applied first
            part, held = self._correct(part, held, number - self.fragments.count)
        rule, theta = held.rule if self.is_late else held, computed(part)
        outgoing = self._outgoing(rule, theta, state, params)
        own = outgoing.message
        theta, rule = self.rule.receive(rule, own, own, own_round(number, self.fragments.count))
        held = held._replace(rule=rule) if self.is_late else rule
        return theta, state._replace(rule=self._with(params, state.rule, held, number)), outgoing

    def correction(self, outgoing: Outgoing, number: Any) -> tuple[PyTree, PyTree]:
        """Exchange what `solo` sends; return c = mean − m of outer step `number` and the exchange's new windows."""
        mean, windows = self._mean(outgoing, number, self.fragments.hidden(outgoing.message))
        return jax.tree.map(jnp.subtract, mean, outgoing.message), windows

    def keep(self, state: OuterState, correction: PyTree, windows: PyTree, number: Any) -> OuterState:
        """Store the correction of outer step `number` until it is due, and its exchange's windows."""
        kept = state.rule.correction
        kept = self.fragments.put(kept, correction, self.fragments.cuts(kept), number)
        state = state._replace(rule=state.rule._replace(correction=kept))
        return self.with_windows(state, windows, kept, number)

    def moved(self, params: PyTree, state: OuterState) -> jax.Array:
        """Return the root-mean-square movement of the next outer step's fragment, a float32 scalar."""
        part, held = self._part(params, state.rule, state.round)
        rule_state, round = held.rule if self.is_late else held, own_round(state.round, self.fragments.count)
        movement = jax.tree.leaves(self.rule.movement(rule_state, computed(part), round))
        squares = sum(jnp.sum(jnp.square(jnp.abs(x)), dtype=jnp.float32) for x in movement)
        return jnp.sqrt(squares / float(sum(x.size for x in movement)))

    def correct(self, params: PyTree, state: OuterState) -> tuple[PyTree, PyTree]:
        """Apply the oldest pending correction, if there is one: results as of `step`."""
        number = state.rule.entered
        part, held = self._part(params, state.rule, number)
        theta, held = self._correct(part, held, state.round - 1)
        return theta, self._with(params, state.rule, held, number)

    def enter(self, params: PyTree, state: PyTree, correction: PyTree, number: Any) -> tuple[PyTree, PyTree]:
        """Apply the correction of solo step `number`, at any later time: results as of `step`."""
        part, rule = self._part(params, state, number)
        theta, rule = self.rule.correct(rule, computed(part), correction, own_round(number, self.fragments.count))
        return theta, self._with(params, state, rule, number)

    def part(self, params: PyTree, number: Any) -> PyTree:
        """Return the fragment of outer step `number` from a tree like the parameters."""
        return self.fragments.part(params, self.fragments.cuts(params), number)

    def put(self, params: PyTree, part: PyTree, number: Any) -> PyTree:
        """Return a tree like the parameters with that fragment replaced."""
        return self.fragments.put(params, part, self.fragments.cuts(params), number)

    def _outgoing(self, rule: PyTree, theta: PyTree, state: OuterState, params: PyTree) -> Outgoing:
        """Return the outgoing data of a fragment θ; `rule` is its part of the rule's state."""
        round = own_round(state.round, self.fragments.count)
        message = self.rule.message(rule, theta, round)
        if state.windows is None:
            return Outgoing(message, None, None)
        windows = self.fragments.part(state.windows, self.fragments.cuts(params), state.round)
        return Outgoing(message, self.rule.movement(rule, theta, round), windows)

    def _mean(self, outgoing: Outgoing, number: Any, hidden: PyTree) -> tuple[PyTree, PyTree]:
        message, movement, windows = outgoing
        return self.exchange(message, pairing_round(number, self.fragments.count), movement, windows, hidden)

    def with_windows(self, state: OuterState, windows: PyTree, params: PyTree, number: Any) -> OuterState:
        """The state once the exchange of outer step `number` has left these windows; None: it keeps none."""
        if windows is None:
            return state
        cuts = self.fragments.cuts(params)
        return state._replace(windows=self.fragments.put(state.windows, windows, cuts, number))

    def _correct(self, part: PyTree, held: Late, last: Any) -> tuple[PyTree, Late]:
        """Apply a fragment's correction if it belongs to outer step `last` or an earlier one.

        Otherwise a correction of zero is applied: its arithmetic costs less than a branch, which would copy both.
        """
        is_due = held.entered <= last
        correction = jax.tree.map(lambda c: jnp.where(is_due, c, jnp.zeros_like(c)), held.correction)
        round = own_round(held.entered, self.fragments.count)
        theta, rule = self.rule.correct(held.rule, computed(part), correction, round)
        return theta, held._replace(entered=held.entered + is_due.astype(jnp.int32), rule=rule)

    def _part(self, params: PyTree, state: PyTree, number: Any) -> tuple[PyTree, Any]:
        cuts = self.fragments.cuts(params)
        return (
            self.fragments.part(params, cuts, number),
            self.fragments.part_of_state(self.init_rule, state, cuts, number),
        )

    def _with(self, params: PyTree, state: PyTree, part: PyTree, number: Any) -> PyTree:
        return self.fragments.put_in_state(self.init_rule, state, part, self.fragments.cuts(params), number)
