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
from noloco_jax.exchange.wire import Wire, encode
from noloco_jax.outer.rule import Arrived, OuterState, Outgoing
from noloco_jax.outer.transform import OuterOptimizer
from noloco_jax.spmd.compile import num_at_once
from noloco_jax.spmd.compile_once import Lowered, compile_all
from noloco_jax.spmd.offload import from_rest
from noloco_jax.spmd.programs import Programs, build_outer, outer_axes, shardings_of
from noloco_jax.spmd.sharding import SLOT
from noloco_jax.spmd.shared_batch import spans_processes

PyTree = Any


@dataclass(frozen=True)
class SoloPrograms:
    """Programs of a run of one replica, whose parameters and state have a leading axis of one. Arguments are donated.

    Messages, payloads and corrections are those of the replica, without that axis.

    Attributes:
      step: (params, outer) -> (params, outer, sent, norm): the solo step, what is kept of its message for an exchange,
        and the message's Euclidean norm, float32. Kept is the payload; of a modulo format, the windows that this
        replica proposes, and the message.
      apply: (params, outer, correction, number) -> (params, outer): the correction of that outer step.
      message: shapes and dtypes of a message.
      payload: shapes and dtypes of what travels: the payload; of a modulo format, the windows, and the payload.
      correction: shapes and dtypes of a correction, once compiled also shardings; of a modulo format, the correction,
        and the windows to remember.
      wire: the format in which messages travel.
      dims: the dimension of every array of a message along which the format cuts blocks.
    """

    step: Callable[..., tuple[PyTree, OuterState, PyTree, jax.Array]]
    apply: Callable[..., tuple[PyTree, OuterState]]
    message: PyTree
    payload: PyTree
    correction: PyTree
    wire: Wire | Modulo
    dims: PyTree


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
    """Build the programs of one replica of an outer optimizer whose groups exchange.

    Args:
      outer: the outer optimizer.
      params: shapes, dtypes and shardings of the parameters, with a leading axis of one.
      state: the same of the outer state.
      whole: the sharding of messages, from which the first process of a replica over several can read them; None: as
        the compiler chooses.
    """
    wire: Wire | Modulo = outer.steps.exchange.wire  # type: ignore[attr-defined]
    placed = shardings_of((params, state))
    outgoing: Outgoing = jax.eval_shape(lambda *args: _solo(outer, *args)[2], params, state)
    message = outgoing.message
    dims = outer.steps.fragments.block_dims(message)
    step = partial(_step, outer, wire, dims)
    sent = jax.eval_shape(step, params, state)[2]
    payload, correction = sent, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), message)
    if isinstance(wire, Modulo):
        windows = sent[0]
        codes = jax.eval_shape(lambda m, w: encode_in(wire, m, w, jnp.int32(0), dims), message, windows)
        payload, correction = (windows, codes), (correction, windows)
    return SoloPrograms(
        step=jax.jit(step, donate_argnums=(0, 1), out_shardings=(*placed, whole, whole)),
        apply=jax.jit(partial(_apply, outer, wire), donate_argnums=(0, 1), out_shardings=placed),
        message=message,
        payload=payload,
        correction=correction,
        wire=wire,
        dims=dims,
    )


def compile_solo(solo: SoloPrograms, programs: Programs) -> SoloPrograms:
    """Compile the programs for the run's shapes and shardings; the outer state they take is between steps."""
    params, _, outer = programs.state
    number = jax.ShapeDtypeStruct((), jnp.int32)
    lowered = (
        Lowered("step", solo.step.lower(params, outer)),  # type: ignore[attr-defined]
        Lowered("apply", solo.apply.lower(params, outer, solo.correction, number)),  # type: ignore[attr-defined]
    )
    compiled = compile_all(lowered, num_at_once(programs))
    step, apply = compiled["step"].program, compiled["apply"].program
    return replace(
        solo,
        step=from_rest(step, programs),
        apply=from_rest(apply, programs),
        correction=_as_taken(solo.correction, apply, 2),
    )


def _as_taken(shapes: PyTree, program: jax.stages.Compiled, argument: int) -> PyTree:
    """Return the shapes of an argument with the shardings in which a compiled program takes it."""
    taken = program.input_shardings[0][argument]
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, taken)


def _step(outer: OuterOptimizer, wire: Wire | Modulo, dims: PyTree, params: PyTree, state: Any) -> Any:
    params, state, (message, movement, windows) = _solo(outer, params, state)
    if isinstance(wire, Modulo):
        sent = propose(wire, message, movement, windows, dims), message
    else:
        sent = encode(wire, message, dims)
    return params, state, sent, optax.tree.norm(message)


def _solo(outer: OuterOptimizer, params: PyTree, state: Any) -> tuple[PyTree, Any, Outgoing]:
    """Take the solo step; what is sent has no leading axis."""
    axes = outer_axes(outer)
    solo = jax.vmap(outer.solo, in_axes=(0, axes), out_axes=(0, axes, 0), axis_name=SLOT)
    params, state, outgoing = solo(params, state)
    return params, state, jax.tree.map(lambda x: x[0], outgoing)


def _apply(
    outer: OuterOptimizer, wire: Wire | Modulo, params: PyTree, state: Any, correction: PyTree, number: jax.Array
) -> Any:
    correction, windows = correction if isinstance(wire, Modulo) else (correction, None)
    arrived = jax.tree.map(lambda x: x[None], Arrived(correction, windows))
    axes = outer_axes(outer)
    apply = jax.vmap(outer.apply, in_axes=(0, axes, 0, None), out_axes=(0, axes), axis_name=SLOT)
    return apply(params, state, arrived, number)
