"""The outer steps of a rule over an exchange: as an Optax transform, and as programs of their own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import optax
from jax.custom_batching import custom_vmap

from noloco_jax.optim.fragments import Fragments
from noloco_jax.optim.rule import Arrived, Delayed, OuterState, Outgoing, computed
from noloco_jax.optim.schedule import SyncSchedule

PyTree = Any
_DTYPES = ("float32", "bfloat16", "float16")


class Exchange:
    """Averaging of a replica's message over its group."""

    def mean(self, outgoing: Outgoing, number: Any, fragments: Fragments) -> tuple[Any, PyTree]:
        """Return the mean of the group's messages as this replica receives it, and the windows to remember, or None.

        Args:
          outgoing: data of this replica.
          number: outer step, an int32 scalar.
          fragments: the fragments, of which the outer step exchanges one.
        """
        raise NotImplementedError

    def windows(self, params: PyTree, fragments: Fragments) -> PyTree:
        """Return the first `OuterState.windows`; None for an exchange that keeps none."""
        return None


class OuterOptimizer(optax.GradientTransformationExtraArgs):
    """An Optax transform (`init`, `update`) that also offers its outer step by itself; see `OuterStep`.

    Attributes:
      steps: the rule, exchange, fragments and schedule that it was made of.
      step: (params, state) -> (params, state): one outer step; with a delay its correction is stored, for `apply`.
      local_step: (params, state) -> (params, state, data to send): one outer step with the own message alone.
      apply: (params, state, arrived, number) -> (params, state): a correction; without the last two a stored one.
    """

    steps: "OuterStep"
    step: Callable[[PyTree, OuterState], tuple[PyTree, OuterState]]
    local_step: Callable[[PyTree, OuterState], tuple[PyTree, OuterState, Outgoing]]
    apply: Callable[..., tuple[PyTree, OuterState]]

    def __new__(cls, init: Any, update: Any, steps: Any = None) -> "OuterOptimizer":
        made = super().__new__(cls, init, update)
        if steps is not None:  # `copy` sets the attributes afterwards
            made.steps, made.step, made.local_step, made.apply = steps, steps.step, steps.local_step, steps.apply
        return made


@dataclass(frozen=True)
class OuterStep:
    """Outer steps of one replica; `number` counts those of all fragments from 0, and is not batched by `vmap`.

    Attributes:
      rule: update of a replica, applied to the fragment alone: `rule.Rule`, or another of its form.
      exchange: averaging of messages over the group.
      fragments: assignment of the parameters to fragments.
      schedule: when outer steps and corrections are due, for updates by the step counter.
      axis_names: the axes of replicas.
    """

    rule: Any
    exchange: Exchange
    fragments: Fragments
    schedule: SyncSchedule
    axis_names: Sequence[str]

    def init(self, params: PyTree) -> OuterState:
        """Return the state before the first outer step."""
        _check_leaves(params)
        count, num_outer_steps, num_applied = (jnp.zeros([], jnp.int32) for _ in range(3))  # one buffer each, to donate
        windows = self.exchange.windows(params, self.fragments)
        delayed = None
        if self.schedule.delay:
            delayed = Delayed(num_applied, jax.tree.map(jnp.zeros_like, computed(params)))
        return OuterState(count, num_outer_steps, self.rule.init(params), windows, delayed)

    def step(self, params: PyTree, state: OuterState) -> tuple[PyTree, OuterState]:
        """Take outer step `state.num_outer_steps`: (params, state)."""
        number = self._checked(params, state)
        theta, state = self._step(params, state, number)
        return self._placed(params, theta, number), state

    def local_step(self, params: PyTree, state: OuterState) -> tuple[PyTree, OuterState, Outgoing]:
        """Take outer step `state.num_outer_steps` with the own message alone: (params, state, data to send)."""
        number = self._checked(params, state)
        theta, state, outgoing = self._local_step(params, state, number)
        return self._placed(params, theta, number), state, outgoing

    def apply(
        self, params: PyTree, state: OuterState, arrived: Arrived | None = None, number: Any = None
    ) -> tuple[PyTree, OuterState]:
        """Apply a correction at any time after its local step: (params, state).

        Args:
          params, state: of the replica.
          arrived: what the exchange of outer step `number` returned. None: apply the oldest pending correction that is
            stored, if there is one; for a delay. One that is pending at its fragment's next outer step is applied then.
          number: its outer step.
        """
        num_outer_steps, delayed = self._checked(params, state), state.delayed
        if arrived is not None:
            theta, rule = self._taken(params, state, number)
            theta, rule = self.rule.correct(rule, theta, arrived.correction, self.fragments.of(number)[1])
            if delayed is not None:
                state = state._replace(delayed=delayed._replace(num_applied=delayed.num_applied + 1))
            return self._placed(params, theta, number), self._with(params, state, number, rule, arrived.windows)
        if delayed is None:
            raise ValueError("there is no stored correction without a delay: give the correction and its outer step")
        number = shared(delayed.num_applied)
        theta, state = self._apply_stored(params, state, number, num_outer_steps - 1)
        return self._placed(params, theta, number), state

    def exchanged(self, outgoing: Outgoing, number: Any) -> Arrived:
        """Exchange the data that `local_step` returned in outer step `number`."""
        mean, windows = self.exchange.mean(outgoing, number, self.fragments)
        return Arrived(jax.tree.map(jnp.subtract, mean, outgoing.message), windows)

    def store(self, state: OuterState, arrived: Arrived, number: Any) -> OuterState:
        """Store the correction of outer step `number` until it is due."""
        assert state.delayed is not None
        params = state.delayed.correction
        correction = self.fragments.put(params, arrived.correction, number)
        state = state._replace(delayed=state.delayed._replace(correction=correction))
        return self._with(params, state, number, None, arrived.windows)

    def update(
        self,
        updates: PyTree,
        state: Any,  # an OuterState; Optax's own type admits any tree
        params: PyTree | None = None,
        *,
        sync: bool | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, OuterState]:
        """Return updates that end on the outer step's result when one is due, and pass through otherwise."""
        del extra_args
        if params is None:
            raise ValueError("the outer update needs the parameters: call update(updates, state, params)")
        if isinstance(sync, jax.core.Tracer):
            raise TypeError(
                "sync is traced: give True or False, for two programs, or None to use the schedule by the step counter"
            )
        if sync is not None and self.schedule.delay:
            raise ValueError(
                "sync is set, and with a delay the update uses its step counter: leave sync out, or call step and apply"
            )
        first = self._checked(params, state)
        state = state._replace(count=jnp.asarray(optax.safe_increment(state.count)))
        if sync is not None and not sync:
            return updates, state
        params = jax.tree.map(jnp.asarray, params)
        # Narrow updates would round φ − θ, and each replica would end beside φ, at a different place.
        updates = jax.tree.map(lambda u: jnp.asarray(u, jnp.float32), updates)

        def run(act: Callable[..., tuple[PyTree, OuterState]], updates: PyTree, state: OuterState, number: Any, *args):
            """Return the updates that end on the result of `act`, an outer step or a correction, and the state."""
            moved = jax.tree.map(lambda p, u: (p.astype(u.dtype) + u).astype(p.dtype), params, updates)  # θ
            theta, state = act(moved, state, number, *args)
            landing = jax.tree.map(_difference, theta, self.fragments.take(params, number))
            return self.fragments.put(updates, landing, number), state

        def run_if(is_due: Any, act: Any, *operands: Any) -> tuple[PyTree, OuterState]:
            return jax.lax.cond(is_due, partial(run, act), lambda updates, state, *_: (updates, state), *operands)

        if sync is not None:
            return run(self._step, updates, state, first)
        count, max_at_once = shared(state.count), self.schedule.max_at_once
        if state.delayed is not None:
            oldest = shared(state.delayed.num_applied)
            waiting = first - oldest - self.schedule.on_the_way(count)
            for i in range(max_at_once):
                updates, state = run_if(i < waiting, self._apply_stored, updates, state, oldest + i, first - 1)
        due = shared(jnp.asarray(self.schedule.due(count), count.dtype))  # `sync_every` may be injected, and batched
        for i in range(max_at_once):
            updates, state = run_if(i < due, self._step, updates, state, first + i)
        return updates, state

    def _step(self, params: PyTree, state: OuterState, number: Any) -> tuple[PyTree, OuterState]:
        """Take outer step `number`; return the fragment's new θ in float32, and the state."""
        if state.delayed is not None:
            theta, state, outgoing = self._local_step(params, state, number)
            return theta, self.store(state, self.exchanged(outgoing, number), number)
        theta, rule = self._taken(params, state, number)
        outgoing = self._outgoing(params, state, theta, rule, number)
        return self._received(
            params, state, rule, outgoing, self.exchange.mean(outgoing, number, self.fragments), number
        )

    def _local_step(self, params: PyTree, state: OuterState, number: Any) -> tuple[PyTree, OuterState, Outgoing]:
        theta, rule = self._taken(params, state, number)
        if state.delayed is not None:  # which holds one correction a fragment, so the previous one is applied first
            theta, rule, state = self._corrected(theta, rule, state, number, number - self.fragments.count)
        outgoing = self._outgoing(params, state, theta, rule, number)
        return *self._received(params, state, rule, outgoing, (outgoing.message, None), number), outgoing

    def _apply_stored(self, params: PyTree, state: OuterState, number: Any, last: Any) -> tuple[PyTree, OuterState]:
        """Apply the stored correction of outer step `number` if that is `last` or an earlier one."""
        theta, rule = self._taken(params, state, number)
        theta, rule, state = self._corrected(theta, rule, state, number, last)
        return theta, self._with(params, state, number, rule)

    def _corrected(
        self, theta: PyTree, rule: Any, state: OuterState, number: Any, last: Any
    ) -> tuple[PyTree, Any, OuterState]:
        """Apply the oldest stored correction to the fragment of `number`, if its outer step is `last` or earlier.

        Otherwise a correction of zero is applied: its arithmetic costs less than a branch, which would copy the state.
        """
        assert state.delayed is not None
        oldest = shared(state.delayed.num_applied)
        is_due = oldest <= last
        correction = self.fragments.take(state.delayed.correction, number)
        correction = jax.tree.map(lambda c: jnp.where(is_due, c, jnp.zeros_like(c)), correction)
        theta, rule = self.rule.correct(rule, theta, correction, self.fragments.of(oldest)[1])
        num_applied = state.delayed.num_applied + is_due.astype(jnp.int32)
        return theta, rule, state._replace(delayed=state.delayed._replace(num_applied=num_applied))

    def _outgoing(self, params: PyTree, state: OuterState, theta: PyTree, rule: Any, number: Any) -> Outgoing:
        k = self.fragments.of(number)[1]
        message = self.rule.message(rule, theta, k)
        if state.windows is None:
            return Outgoing(message)
        windows = self.fragments.take(state.windows, number, like=params)
        return Outgoing(message, self.rule.movement(rule, theta, k), windows)

    def _received(
        self, params: PyTree, state: OuterState, rule: Any, outgoing: Outgoing, exchanged: tuple, number: Any
    ) -> tuple[PyTree, OuterState]:
        """Return the fragment's new θ and the state from the mean and the windows that an exchange gave."""
        mean, windows = exchanged
        theta, rule = self.rule.receive(rule, outgoing.message, mean, self.fragments.of(number)[1])
        state = self._with(params, state, number, rule, windows)
        return theta, state._replace(num_outer_steps=state.num_outer_steps + 1)

    def _taken(self, params: PyTree, state: OuterState, number: Any) -> tuple[PyTree, Any]:
        """Return θ and the rule's state of the fragment of outer step `number`, in float32."""
        theta, *rule = (computed(self.fragments.take(tree, number)) for tree in (params, *state.rule))
        return theta, type(state.rule)(*rule)

    def _with(
        self, params: PyTree, state: OuterState, number: Any, rule: Any = None, windows: PyTree = None
    ) -> OuterState:
        """Return the state with the fragment's part of the rule's state, and of the windows, where they are given."""
        if rule is not None:
            parts = zip(state.rule, rule, strict=True)
            state = state._replace(rule=type(rule)(*(self.fragments.put(tree, part, number) for tree, part in parts)))
        if windows is not None:
            state = state._replace(windows=self.fragments.put(state.windows, windows, number, like=params))
        return state

    def _placed(self, params: PyTree, theta: PyTree, number: Any) -> PyTree:
        """Return the parameters with the fragment θ, in their dtypes."""
        if self.fragments.count > 1:
            return self.fragments.put(params, theta, number)
        # A caller may donate both parameters and state, so they must not share a buffer.
        return jax.tree.map(lambda x, p: jnp.array(x, p.dtype, copy=True), theta, params)

    def _checked(self, params: PyTree, state: Any) -> Any:
        """Return the number of the next outer step, after checks of parameters and state."""
        _check_leaves(params)
        _check_varying(params, self.axis_names)
        expected = jax.eval_shape(self.init, params)
        same = jax.tree.structure(state) == jax.tree.structure(expected)
        if not same or [*map(jnp.shape, jax.tree.leaves(state))] != [x.shape for x in jax.tree.leaves(expected)]:
            raise ValueError(
                "the state was made for other parameters, or by an outer optimizer with other settings (a delay, a "
                "modulo wire format, another method): give what it was made with, or make a new one by init(params)"
            )
        return shared(state.num_outer_steps)


def _difference(target: jax.Array, x: jax.Array) -> jax.Array:
    """Return the update that moves `x` to `target` rounded to the dtype of `x`, equal on replicas with one target."""
    rounded = target
    if x.dtype != target.dtype:  # a compiler may remove a conversion to the narrower dtype and back
        info = jnp.finfo(x.dtype)
        rounded = jax.lax.reduce_precision(target, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    return rounded - x.astype(target.dtype)


@custom_vmap
def shared(counter: jax.Array) -> jax.Array:
    """Return `counter` unbatched; it must have the same value in every element of the batch.

    Under `vmap` over replicas or seeds the result is the maximum over the batch, an unbatched scalar. A `lax.cond` or
    `lax.switch` on it therefore stays a branch; on a batched value JAX would compute every branch and select. Over a
    mesh axis nothing is sent: every device decides by its own counter.
    """
    return counter


@shared.def_vmap
def _shared_under_vmap(axis_size: int, is_batched: list[bool], counter: jax.Array) -> tuple[jax.Array, bool]:
    del axis_size
    return shared(counter.max(axis=0) if is_batched[0] else counter), False


def _check_leaves(params: PyTree) -> None:
    """Check that the parameters are arrays of floating-point numbers that outer steps can compute in float32.

    Raises:
      TypeError: for another leaf, by its name.
    """
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path) or "the parameter"
        dtype = getattr(leaf, "dtype", None)
        if dtype is None:
            raise TypeError(f"{name} is a Python {type(leaf).__name__}: give an array, such as jnp.asarray({leaf!r})")
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            raise TypeError(f"{name} is a PRNG key and has no mean over replicas: keep it out of the parameters")
        if dtype.name in _DTYPES:
            continue
        if jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(f"{name} is of {dtype} and outer steps compute in float32: convert it to float32")
        raise TypeError(
            f"{name} is of {dtype} and has no mean over replicas: keep it out of the parameters, or wrap the outer "
            "optimizer in optax.masked"
        )


def _check_varying(params: PyTree, axis_names: Sequence[str]) -> None:
    """Check that the type of the parameters in `shard_map` lets them differ between replicas.

    Args:
      params: parameters of one replica.
      axis_names: the axes of replicas.

    Raises:
      ValueError: if they are typed as equal on all replicas.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    tracked = [axis for axis in axis_names if axis in manual and axis in _varying(jax.lax.axis_index(axis))]
    for path, leaf in jax.tree.leaves_with_path(params) if tracked else ():
        fixed = [axis for axis in tracked if axis not in _varying(leaf)]
        if fixed:
            raise ValueError(
                f"{jax.tree_util.keystr(path) or 'the parameter'} is the same on all devices of axis {fixed[0]!r} by "
                "its type, so that jax.grad sums its gradient over them at every step: pass parameters and state "
                f"through shard_map with in_specs=P({fixed[0]!r}), replicas leading, or cast them by "
                "jax.lax.pcast(..., to='varying') before the gradient is taken"
            )


def _varying(x: Any) -> frozenset[str]:
    """Return the mesh axes over which a value may differ, as `shard_map` tracks them (`check_vma`)."""
    return jax.typeof(x).mat.varying
