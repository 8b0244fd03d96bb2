"""Programs of an island: a replica that trains alone and exchanges messages outside of JAX's collectives."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from noloco_jax.config import TrainConfig
from noloco_jax.exchange import windows
from noloco_jax.exchange.modulo import Modulo
from noloco_jax.exchange.wire import Wire, to_code, wire_of
from noloco_jax.outer.moments import Moments
from noloco_jax.outer.rule import OuterState
from noloco_jax.outer.step import Outgoing
from noloco_jax.outer.transform import OuterOptimizer
from noloco_jax.spmd.offload import from_rest
from noloco_jax.spmd.programs import Programs, build_moments, build_outer, of_moments, outer_axes, shardings_of
from noloco_jax.spmd.sharding import SLOT
from noloco_jax.spmd.shared_batch import spans_processes
from noloco_jax.wires import moments_wire

PyTree = Any


@dataclass(frozen=True)
class SoloMoments:
    """Programs that average the inner optimizer's moments beside a solo step; `enter` donates the inner state.

    Attributes:
      send: (inner, number of the outer step) -> (code, sent): the moments' code, and what it encodes, None if the code
        is exact.
      change: (sent, mean) -> correction of one replica: see `Moments.change`.
      enter: (inner, correction, number, age) -> inner, `age` inner steps after outer step `number`.
      code: shapes and dtypes of the code.
      sent: shapes and dtypes of what it encodes, and of a correction, once compiled also its shardings.
      wire: the form in which moments travel.
      cuts: the dimension of every array of one replica along which the code's blocks lie.
    """

    send: Callable[..., tuple[PyTree, PyTree]]
    change: Callable[[PyTree, PyTree], PyTree]
    enter: Callable[..., PyTree]
    code: PyTree
    sent: PyTree
    wire: Wire
    cuts: PyTree


@dataclass(frozen=True)
class SoloPrograms:
    """Programs of a run of one replica, whose arrays have a leading axis of one. Arguments are donated.

    Attributes:
      step: (params, outer) -> (params, outer, kept, norm): the solo step, what is kept of its message for an exchange,
        and the message's Euclidean norm, float32. Kept is the message as it travels; of a code in windows, the windows
        that this replica proposes, and the message.
      enter: (params, outer, correction, round) -> (params, outer): the correction of that round's solo step.
      message: shapes and dtypes of a message.
      code: shapes and dtypes of what travels: the message's code; of a code in windows, the windows, and the code.
      correction: shapes and dtypes of a correction, once compiled also shardings; of a code in windows, the correction,
        and the windows to remember.
      wire: the form in which messages travel.
      cuts: the dimension of every array of a replica's message along which the code's blocks lie.
      kept: shapes and dtypes of what is kept of a message.
      moments: programs for the inner optimizer's moments; None if they are not averaged.
    """

    step: Callable[..., tuple[PyTree, OuterState, PyTree, jax.Array]]
    enter: Callable[..., tuple[PyTree, OuterState]]
    message: PyTree
    code: PyTree
    correction: PyTree
    wire: Wire | Modulo
    cuts: PyTree
    kept: PyTree
    moments: SoloMoments | None


def build_solo(config: TrainConfig, programs: Programs) -> SoloPrograms:
    """Build the programs of a run of one replica whose method has outer steps; they compile at their first call.

    The partitioner handles `fsdp` and `tensor`: with one replica no axis is manual. The blocks of a wire format are
    therefore those of whole arrays on any mesh, so that replicas on different meshes can exchange messages. Arrays that
    are sharded inside the replica are gathered for that, one by one.
    """
    outer = build_outer(config, SLOT)
    params, _, state = programs.state
    assert outer is not None and state is not None
    moments = build_moments(config, outer, params)
    whole = NamedSharding(programs.mesh, P()) if spans_processes(programs.mesh) else None
    return replace(
        solo_of(outer, params, state, whole),
        moments=moments and _build_moments(moments, wire_of(moments_wire(config.outer.wire)), programs, whole),
    )


def solo_of(outer: OuterOptimizer, params: PyTree, state: OuterState, whole: Any = None) -> SoloPrograms:
    """Build the programs of one replica of an outer optimizer whose groups exchange (`exchange.groups`).

    Args:
      outer: the outer optimizer.
      params: shapes, dtypes and shardings of the parameters, with a leading axis of one.
      state: the same of the outer state.
      whole: the sharding of messages, from which the first process of a replica over several can read them; None: as
        the compiler chooses.
    """
    wire: Wire | Modulo = outer.exchange.wire  # type: ignore[attr-defined]
    placed = shardings_of((params, state))
    _, _, outgoing = jax.eval_shape(partial(_solo, outer), params, state)
    message = outgoing.message
    cuts = outer.fragments.hidden(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), message))
    step = partial(_step, outer, wire, cuts)
    _, _, kept, _ = jax.eval_shape(step, params, state)
    if isinstance(wire, Modulo):
        encode = jax.vmap(lambda windows_of_pair, one: windows.encoded(wire, one, windows_of_pair, cuts))
        code, correction = (kept[0], jax.eval_shape(encode, *kept)), (message, outgoing.windows)
    else:
        code, correction = kept, message
    return SoloPrograms(
        step=jax.jit(step, donate_argnums=(0, 1), out_shardings=(*placed, whole, whole)),
        enter=jax.jit(partial(_enter, outer, wire), donate_argnums=(0, 1), out_shardings=placed),
        message=message,
        code=code,
        correction=correction,
        wire=wire,
        cuts=cuts,
        kept=kept,
        moments=None,
    )


def _build_moments(moments: Moments, wire: Any, programs: Programs, whole: Any) -> SoloMoments:
    inner, number = programs.state.inner, jax.ShapeDtypeStruct((), jnp.int32)
    sent = jax.eval_shape(partial(of_moments, moments.sent), inner, number)
    cuts = moments.cuts(sent)

    def send(inner: PyTree, number: jax.Array) -> tuple[PyTree, PyTree]:
        sent = of_moments(moments.sent, inner, number)
        code = jax.vmap(lambda one: jax.tree.map(wire.encode, to_code(wire, one, cuts)))(sent)
        return code, None if wire.exact else sent

    def enter(inner: PyTree, correction: PyTree, number: jax.Array, age: jax.Array) -> PyTree:
        return of_moments(
            lambda inner, one, number: moments.corrected(inner, one, number, age), inner, correction, number
        )

    code, _ = jax.eval_shape(send, inner, number)
    return SoloMoments(
        send=jax.jit(send, out_shardings=whole),
        change=moments.change,
        enter=jax.jit(enter, donate_argnums=0, out_shardings=shardings_of(inner)),
        code=code,
        sent=sent,
        wire=wire,
        cuts=cuts,
    )


def compile_solo(solo: SoloPrograms, programs: Programs) -> SoloPrograms:
    """Compile the programs for the run's shapes and shardings; the outer state they take and return is at rest."""
    params, _, outer = programs.state
    round = jax.ShapeDtypeStruct((), jnp.int32)
    step = solo.step.lower(params, outer).compile()  # type: ignore[attr-defined]
    enter = solo.enter.lower(params, outer, solo.correction, round).compile()  # type: ignore[attr-defined]
    if (moments := solo.moments) is not None:
        inner = programs.state.inner
        send = moments.send.lower(inner, round).compile()  # type: ignore[attr-defined]
        late = moments.enter.lower(inner, moments.sent, round, round).compile()  # type: ignore[attr-defined]
        moments = replace(moments, send=send, enter=late, sent=_as_taken(moments.sent, late, 1))
    return replace(
        solo,
        step=from_rest(step, programs),
        enter=from_rest(enter, programs),
        correction=_as_taken(solo.correction, enter, 2),
        moments=moments,
    )


def _as_taken(shapes: PyTree, program: jax.stages.Compiled, argument: int) -> PyTree:
    """Return the shapes of an argument with the shardings in which a compiled program takes it."""
    taken = program.input_shardings[0][argument]
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, taken)


def _step(outer: OuterOptimizer, wire: Wire | Modulo, cuts: PyTree, params: PyTree, state: Any) -> Any:
    params, state, outgoing = _solo(outer, params, state)

    def kept(message: PyTree, movement: PyTree, remembered: PyTree) -> PyTree:
        if isinstance(wire, Modulo):
            return windows.proposed(wire, message, movement, remembered, cuts), message
        return jax.tree.map(wire.encode, to_code(wire, message, cuts))

    return params, state, jax.vmap(kept)(*outgoing), optax.tree.norm(outgoing.message)


def _solo(outer: OuterOptimizer, params: PyTree, state: Any) -> tuple[PyTree, Any, Outgoing]:
    axes = outer_axes(outer)
    solo = jax.vmap(outer.solo, in_axes=(0, axes), out_axes=(0, axes, 0), axis_name=SLOT)
    return solo(params, state)


def _enter(
    outer: OuterOptimizer, wire: Wire | Modulo, params: PyTree, state: Any, correction: PyTree, round: jax.Array
) -> Any:
    correction, remembered = correction if isinstance(wire, Modulo) else (correction, None)
    axes = outer_axes(outer)
    enter = jax.vmap(outer.enter, in_axes=(0, axes, 0, None, 0), out_axes=(0, axes), axis_name=SLOT)
    return enter(params, state, correction, round, remembered)
