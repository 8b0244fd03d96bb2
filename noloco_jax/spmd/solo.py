"""Programs of an island: a replica that trains alone and exchanges messages outside of JAX's collectives."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from noloco_jax.config import TrainConfig
from noloco_jax.exchange.modulo import Modulo
from noloco_jax.exchange.wire import Wire, to_code, wire_of
from noloco_jax.methods import method_of
from noloco_jax.outer.rule import OuterState
from noloco_jax.outer.transform import OuterOptimizer
from noloco_jax.spmd import sharding
from noloco_jax.spmd.offload import from_rest
from noloco_jax.spmd.programs import SLOT, Programs, outer_axes, shardings_of

PyTree = Any


@dataclass(frozen=True)
class SoloPrograms:
    """Programs of a run of one replica, whose arrays have a leading axis of one. Arguments are donated.

    Attributes:
      step: (params, outer) -> (params, outer, payload, norm): the solo step, the encoded message, and the message's
        Euclidean norm, float32.
      enter: (params, outer, correction, round) -> (params, outer): applies the correction of that round's solo step.
      message: shapes and dtypes of a message, and of corrections.
      code: shapes and dtypes of the payload.
      wire: wire format of the message.
      cuts: the dimension of every array of a replica's message along which the wire format's blocks lie.
    """

    step: Callable[..., tuple[PyTree, OuterState, PyTree, jax.Array]]
    enter: Callable[..., tuple[PyTree, OuterState]]
    message: PyTree
    code: PyTree
    wire: Wire
    cuts: PyTree


def build_solo(config: TrainConfig, programs: Programs) -> SoloPrograms:
    """Build the programs of a run of one replica whose method has outer steps; they compile at their first call.

    The partitioner handles `fsdp` and `tensor`: with one replica no axis is manual. The blocks of a wire format are
    therefore those of whole arrays on any mesh, so that replicas on different meshes can exchange messages. Arrays that
    are sharded inside the replica are gathered for that, one by one.
    """
    make_outer = method_of(config).outer_optimizer
    assert make_outer is not None
    fragments = sharding.fragments_of(config.outer.fragments)
    outer = make_outer(config, SLOT, fragments)
    params, _, state = programs.state
    placed = shardings_of((params, state))
    _, _, message = jax.eval_shape(partial(_solo, outer), params, state)
    wire = wire_of(config.outer.wire)
    assert not isinstance(wire, Modulo)  # the modulo format needs two messages an exchange
    cuts = fragments.hidden(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), message))
    step = partial(_step, outer, wire, cuts)
    _, _, code, _ = jax.eval_shape(step, params, state)
    return SoloPrograms(
        step=jax.jit(step, donate_argnums=(0, 1), out_shardings=(*placed, None, None)),
        enter=jax.jit(partial(_enter, outer), donate_argnums=(0, 1), out_shardings=placed),
        message=message,
        code=code,
        wire=wire,
        cuts=cuts,
    )


def compile_solo(solo: SoloPrograms, programs: Programs) -> SoloPrograms:
    """Compile the programs for the run's shapes and shardings; the outer state they take and return is at rest."""
    params, _, outer = programs.state
    round = jax.ShapeDtypeStruct((), jnp.int32)
    step = solo.step.lower(params, outer).compile()  # type: ignore[attr-defined]
    enter = solo.enter.lower(params, outer, solo.message, round).compile()  # type: ignore[attr-defined]
    return replace(solo, step=from_rest(step, programs), enter=from_rest(enter, programs))


def _step(outer: OuterOptimizer, wire: Wire, cuts: PyTree, params: PyTree, state: Any) -> Any:
    params, state, message = _solo(outer, params, state)
    code = jax.vmap(lambda one: jax.tree.map(wire.encode, to_code(wire, one, cuts)))(message)
    return params, state, code, optax.tree.norm(message)


def _solo(outer: OuterOptimizer, params: PyTree, state: Any) -> Any:
    axes = outer_axes(outer)
    solo = jax.vmap(outer.solo, in_axes=(0, axes), out_axes=(0, axes, 0), axis_name=SLOT)
    params, state, outgoing = solo(params, state)
    return params, state, outgoing.message


def _enter(outer: OuterOptimizer, params: PyTree, state: Any, correction: PyTree, round: jax.Array) -> Any:
    axes = outer_axes(outer)
    enter = jax.vmap(outer.enter, in_axes=(0, axes, 0, None), out_axes=(0, axes), axis_name=SLOT)
    return enter(params, state, correction, round)
