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
from noloco_jax.exchange.modulo import Modulo, encode_in, propose
from noloco_jax.exchange.wire import Wire, to_code
from noloco_jax.outer.rule import Arrived, OuterState, Outgoing
from noloco_jax.outer.transform import OuterOptimizer
from noloco_jax.spmd.offload import from_rest
from noloco_jax.spmd.programs import Programs, build_outer, outer_axes, shardings_of
from noloco_jax.spmd.sharding import SLOT
from noloco_jax.spmd.shared_batch import spans_processes

PyTree = Any


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
    """

    step: Callable[..., tuple[PyTree, OuterState, PyTree, jax.Array]]
    enter: Callable[..., tuple[PyTree, OuterState]]
    message: PyTree
    code: PyTree
    correction: PyTree
    wire: Wire | Modulo
    cuts: PyTree
    kept: PyTree


def build_solo(config: TrainConfig, programs: Programs) -> SoloPrograms:
    """Build the programs of a run of one replica whose method has outer steps; they compile at their first call.

    The partitioner handles `fsdp` and `tensor`: with one replica no axis is manual. The blocks of a wire format are
    therefore those of whole arrays on any mesh, so that replicas on different meshes can exchange messages. Arrays that
    are sharded inside the replica are gathered for that, one by one.
    """
    outer = build_outer(config, SLOT)
    params, _, state = programs.state
    assert outer is not None and state is not None
    whole = NamedSharding(programs.mesh, P()) if spans_processes(programs.mesh) else None
    return solo_of(outer, params, state, whole)


def solo_of(outer: OuterOptimizer, params: PyTree, state: OuterState, whole: Any = None) -> SoloPrograms:
    """Build the programs of one replica of an outer optimizer whose groups exchange (`exchange.mean`).

    Args:
      outer: the outer optimizer.
      params: shapes, dtypes and shardings of the parameters, with a leading axis of one.
      state: the same of the outer state.
      whole: the sharding of messages, from which the first process of a replica over several can read them; None: as
        the compiler chooses.
    """
    wire: Wire | Modulo = outer.steps.exchange.wire  # type: ignore[attr-defined]
    placed = shardings_of((params, state))
    _, _, outgoing = jax.eval_shape(partial(_solo, outer), params, state)
    message = outgoing.message
    cuts = outer.steps.fragments.block_dims(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), message))
    step = partial(_step, outer, wire, cuts)
    _, _, kept, _ = jax.eval_shape(step, params, state)
    if isinstance(wire, Modulo):
        encode = jax.vmap(lambda windows_of_pair, one: encode_in(wire, one, windows_of_pair, 0, cuts))
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
    )


def compile_solo(solo: SoloPrograms, programs: Programs) -> SoloPrograms:
    """Compile the programs for the run's shapes and shardings; the outer state they take and return is at rest."""
    params, _, outer = programs.state
    round = jax.ShapeDtypeStruct((), jnp.int32)
    step = solo.step.lower(params, outer).compile()  # type: ignore[attr-defined]
    enter = solo.enter.lower(params, outer, solo.correction, round).compile()  # type: ignore[attr-defined]
    return replace(
        solo,
        step=from_rest(step, programs),
        enter=from_rest(enter, programs),
        correction=_as_taken(solo.correction, enter, 2),
    )


def _as_taken(shapes: PyTree, program: jax.stages.Compiled, argument: int) -> PyTree:
    """Return the shapes of an argument with the shardings in which a compiled program takes it."""
    taken = program.input_shardings[0][argument]
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, taken)


def _step(outer: OuterOptimizer, wire: Wire | Modulo, cuts: PyTree, params: PyTree, state: Any) -> Any:
    params, state, outgoing = _solo(outer, params, state)

    def kept(message: PyTree, movement: PyTree, remembered: PyTree) -> PyTree:
        if isinstance(wire, Modulo):
            return propose(wire, message, movement, remembered, cuts), message
        return jax.tree.map(wire.encode, to_code(wire, message, cuts))

    return params, state, jax.vmap(kept)(*outgoing), optax.tree.norm(outgoing.message)


def _solo(outer: OuterOptimizer, params: PyTree, state: Any) -> tuple[PyTree, Any, Outgoing]:
    axes = outer_axes(outer)
    solo = jax.vmap(outer.solo, in_axes=(0, axes), out_axes=(0, axes, 0), axis_name=SLOT)
    return solo(params, state)


def _enter(
    outer: OuterOptimizer, wire: Wire | Modulo, params: PyTree, state: Any, correction: PyTree, round: jax.Array
) -> Any:
    arrived = Arrived(*correction) if isinstance(wire, Modulo) else Arrived(correction)
    axes = outer_axes(outer)
    enter = jax.vmap(outer.apply, in_axes=(0, axes, 0, None), out_axes=(0, axes), axis_name=SLOT)
    return enter(params, state, arrived, round)
