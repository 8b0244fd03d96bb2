"""The Optax transform of a rule and an exchange, and the outer step as a program of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import optax
from jax.custom_batching import custom_vmap

from noloco_jax.outer.fragments import Fragments
from noloco_jax.outer.misuse import check_params
from noloco_jax.outer.rule import Exchange, OuterState, Rule, common_dtype, compute_dtype
from noloco_jax.outer.step import OuterSteps, Outgoing
from noloco_jax.schedule import SyncSchedule

PyTree = Any


class OuterOptimizer(optax.GradientTransformationExtraArgs):
    """An Optax transform that also offers its outer step by itself.

    Attributes:
      init: params -> `OuterState`.
      update: see `noloco`.
      step: (params, state) -> (params, state): one outer step, for a program of its own. It counts rounds by itself.
      correct: (params, state) -> (params, state): applies the oldest pending correction, if any; None without a delay.
        A correction that is still pending at its fragment's next `step` is applied there.
      moved: (params, state) -> movement of the replica, see `OuterSteps.moved`.
      rule: update of a replica in an outer step.
      schedule: when outer steps are due.
      fragments: cut of the parameters into fragments.
      exchange: averaging of a fragment of the parameters.
      solo: (params, state) -> (params, state, Outgoing): `step` without the exchange, which follows elsewhere or later.
      correction: (Outgoing, number of the outer step) -> (correction, windows): the exchange by itself.
      keep: (state, correction, windows, number) -> state that holds the correction for `correct`; for a delay.
      enter: (params, state, correction, round, windows) -> (params, state): what came of the message of that round's
        `solo`; windows of `correction`, None for an exchange that keeps none.
    """

    step: Callable[[PyTree, OuterState], tuple[PyTree, OuterState]]
    correct: Callable[[PyTree, OuterState], tuple[PyTree, OuterState]] | None
    moved: Callable[[PyTree, OuterState], jax.Array]
    rule: Rule
    schedule: SyncSchedule
    fragments: Fragments
    exchange: Exchange
    solo: Callable[[PyTree, OuterState], tuple[PyTree, OuterState, Outgoing]]
    correction: Callable[[Outgoing, Any], tuple[PyTree, PyTree]]
    keep: Callable[[OuterState, PyTree, PyTree, Any], OuterState]
    enter: Callable[..., tuple[PyTree, OuterState]]

    def __new__(cls, init: Any, update: Any, **more: Any) -> "OuterOptimizer":
        made = super().__new__(cls, init, update)
        vars(made).update(more)  # `copy` calls without `more` and sets the copied attributes afterwards
        return made


def outer_optimizer(steps: OuterSteps, schedule: SyncSchedule, axis_names: Sequence[str]) -> OuterOptimizer:
    """Return a transform whose update ends on the outer step's result when one is due, and passes through otherwise.

    Args:
      steps: the outer steps of a replica.
      schedule: when outer steps are due, for updates without `sync`.
      axis_names: the axes of replicas.
    """

    expected: dict[Any, Any] = {}  # structure and shapes of parameters -> structure of their state, shapes of `rule`

    def init_fn(params: PyTree) -> OuterState:  # a function, which copies of the transform share
        return steps.init(params)

    def check(params: PyTree, state: Any) -> None:
        check_params(params, axis_names)
        key = _form(params)
        if key not in expected:
            made = jax.eval_shape(steps.init, params)
            expected[key] = jax.tree.structure(made), _form(made.rule)
        structure, rule = expected[key]
        if jax.tree.structure(state) != structure or _form(state.rule) != rule:
            raise ValueError(
                "the state was made for other parameters, or by an outer optimizer with other settings (a delay, a "
                "modulo wire format, another method): give what it was made with, or make a new one by init(params)"
            )

    def step_fn(params: PyTree, state: OuterState) -> tuple[PyTree, OuterState]:
        check(params, state)
        number = shared(state.round)
        part, after = steps.step(params, state._replace(round=number))
        return placed(params, part, number), after._replace(round=state.round + 1)

    def correct_fn(params: PyTree, state: OuterState) -> tuple[PyTree, OuterState]:
        check(params, state)
        number = shared(state.rule.entered)
        before = state._replace(round=shared(state.round), rule=state.rule._replace(entered=number))
        part, rule_state = steps.correct(params, before)
        rule_state = rule_state._replace(entered=state.rule.entered + (rule_state.entered - number))
        return placed(params, part, number), state._replace(rule=rule_state)

    def solo_fn(params: PyTree, state: OuterState) -> tuple[PyTree, OuterState, Outgoing]:
        check(params, state)
        number = shared(state.round)
        part, after, outgoing = steps.solo(params, state._replace(round=number))
        return placed(params, part, number), after._replace(round=state.round + 1), outgoing

    def enter_fn(
        params: PyTree, state: OuterState, correction: PyTree, round: Any, windows: PyTree = None
    ) -> tuple[PyTree, OuterState]:
        check_params(params, axis_names)
        part, rule_state = steps.enter(params, state.rule, correction, round)
        after = steps.with_windows(state._replace(rule=rule_state), windows, params, round)
        return placed(params, part, round), after

    def placed(params: PyTree, part: PyTree, number: Any) -> PyTree:
        if steps.fragments.count > 1:
            return steps.put(params, part, number)
        # A caller may donate both parameters and state, so they must not share a buffer.
        return jax.tree.map(lambda x, p: jnp.array(x, p.dtype, copy=True), part, params)

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
            raise TypeError(
                "sync is traced: give True or False, for two programs, or None to use the schedule by the step counter"
            )
        if sync is not None and steps.is_late:
            raise ValueError(
                "sync is set, and with a delay the update uses its step counter: leave sync out, or call step and "
                "correct"
            )
        check(params, state)
        state = state._replace(count=jnp.asarray(optax.safe_increment(state.count)))
        if sync is not None and not sync:
            return updates, state
        params = jax.tree.map(jnp.asarray, params)
        # Narrow updates would round φ − θ, and each replica would end beside φ, at a different place.
        updates = jax.tree.map(lambda u, p: u.astype(_update_dtype(u.dtype, p.dtype)), updates, params)

        def landing(updates: PyTree, part: PyTree, number: Any) -> PyTree:
            before = steps.part(params, number)
            return steps.put(updates, jax.tree.map(_difference, part, before), number)

        def land(updates: PyTree, round: jax.Array, held: Any) -> tuple[PyTree, Any]:
            rule_state, windows = held
            before = state._replace(round=round, rule=rule_state, windows=windows)
            part, after = steps.step(_moved(params, updates), before)
            return landing(updates, part, round), (after.rule, after.windows)

        def land_late(updates: PyTree, number: jax.Array, held: Any) -> tuple[PyTree, Any]:
            rule_state, windows = held
            before = state._replace(round=shared(state.round), rule=rule_state._replace(entered=number))
            part, rule_state = steps.correct(_moved(params, updates), before)
            return landing(updates, part, number), (rule_state, windows)

        held = state.rule, state.windows
        if sync is not None:
            updates, (rule_state, windows) = land(updates, shared(state.round), held)
            return updates, state._replace(round=state.round + 1, rule=rule_state, windows=windows)

        count, round = shared(state.count), shared(state.round)
        if steps.is_late:
            entered = shared(state.rule.entered)
            waiting = round - entered - schedule.on_the_way(count)
            for i in range(schedule.most):
                updates, held = _if_due(i < waiting, land_late, updates, entered + i, held)
            entered = state.rule.entered + jnp.clip(waiting, 0, schedule.most)
            held = held[0]._replace(entered=entered), held[1]
        due = shared(jnp.asarray(schedule.due(count), count.dtype))  # `sync_every` may be a batched hyperparameter
        for i in range(schedule.most):
            updates, held = _if_due(i < due, land, updates, round + i, held)
        return updates, state._replace(round=state.round + due, rule=held[0], windows=held[1])

    def moved_fn(params: PyTree, state: OuterState) -> jax.Array:
        return steps.moved(params, state._replace(round=shared(state.round)))

    return OuterOptimizer(
        init_fn,
        update_fn,
        step=step_fn,
        correct=correct_fn if steps.is_late else None,
        moved=moved_fn,
        rule=steps.rule,
        schedule=schedule,
        fragments=steps.fragments,
        exchange=steps.exchange,
        solo=solo_fn,
        correction=steps.correction,
        keep=steps.keep,
        enter=enter_fn,
    )


def _form(tree: PyTree) -> tuple[Any, tuple]:
    """Return the structure and the shapes of a tree."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple(jnp.shape(leaf) for leaf in leaves)


def _update_dtype(update: Any, param: Any) -> Any:
    """Return the dtype of updates: float32 or wider, and under strict promotion one that Optax can add."""
    widest = common_dtype(update, param)
    promotion = getattr(jax.config, "jax_numpy_dtype_promotion")  # noqa: B009, as JAX declares no such attribute
    return widest if promotion == "strict" else compute_dtype(widest)


def _if_due(is_due: Any, land: Any, updates: PyTree, number: jax.Array, held: Any) -> tuple[PyTree, Any]:
    """Return the updates and the state held between outer steps, passed through `land` if it is due."""

    def skip(updates: PyTree, number: jax.Array, held: Any) -> tuple[PyTree, Any]:
        del number
        return updates, held

    return jax.lax.cond(is_due, land, skip, updates, number, held)


def _moved(params: PyTree, updates: PyTree) -> PyTree:
    """Return θ, the parameters after the inner optimizer's updates."""
    return jax.tree.map(lambda p, u: (p.astype(u.dtype) + u).astype(p.dtype), params, updates)


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
