"""Programs of an island: a replica that trains alone and exchanges messages outside of JAX's collectives.

They are the outer optimizer's local step and correction, see `OuterOptimizer`, and what a message becomes on its way.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from noloco_jax.config import TrainConfig
from noloco_jax.optim.exchange.modulo import Modulo, encode_in, propose
from noloco_jax.optim.exchange.wire import Wire, encode
from noloco_jax.optim.methods import METHODS
from noloco_jax.optim.outer_step import OuterOptimizer
from noloco_jax.optim.rule import Arrived, OuterState, Outgoing
from noloco_jax.spmd.batches import spans_processes
from noloco_jax.spmd.compile_once import Lowered, compile_all
from noloco_jax.spmd.offload import from_host_memory
from noloco_jax.spmd.outer_programs import NUMBER, build_outer, outer_axes
from noloco_jax.spmd.programs import Programs, shardings_of
from noloco_jax.spmd.sharding import SLOT

PyTree = Any


@dataclass(frozen=True)
class LocalPrograms:
    """Programs of one replica, which donate the outer state and, where replicas are in front, the parameters.

    In the trainer, parameters and state have a leading axis of one replica; messages, payloads and corrections never.

    Attributes:
      step: (params, outer) -> (params, outer, sent, norm): the local step, what is kept of its message for an exchange,
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


def build_local(config: TrainConfig, programs: Programs) -> LocalPrograms:
    """Build the programs of a run of one replica whose method has outer steps; they compile at their first call.

    The partitioner handles `fsdp` and `tensor`: with one replica no axis is manual. The blocks of a wire format are
    therefore those of whole arrays on any mesh, so that replicas on different meshes can exchange messages. Arrays that
    are sharded inside the replica are gathered for that, one by one.
    """
    outer = build_outer(METHODS[config.method], config.outer, config.model, config.num_replicas, config.seed, SLOT)
    params, _, state = programs.state
    assert outer is not None and state is not None
    # The first process of a replica over several can read a message only where every process has all of it.
    whole = NamedSharding(programs.mesh, P()) if spans_processes(programs.mesh) else None
    axes = outer_axes(outer)
    step = jax.vmap(outer.local_step, in_axes=(0, axes), out_axes=(0, axes, 0), axis_name=SLOT)
    apply = jax.vmap(outer.apply, in_axes=(0, axes, 0, None), out_axes=(0, axes), axis_name=SLOT)

    def local_step(params: PyTree, state: OuterState) -> tuple[PyTree, OuterState, Outgoing]:
        params, state, outgoing = step(params, state)
        return params, state, jax.tree.map(lambda x: x[0], outgoing)

    def apply_correction(params: PyTree, state: OuterState, arrived: Arrived, number: jax.Array) -> Any:
        return apply(params, state, jax.tree.map(lambda x: x[None], arrived), number)

    return _local_of(outer, local_step, apply_correction, params, state, whole, donate=(0, 1))


def build_own(outer: OuterOptimizer, params: PyTree, state: OuterState) -> LocalPrograms:
    """Build the programs of a user's loop, whose parameters and state have no axis of replicas.

    `params` and `state` have shapes, dtypes and shardings. The parameters are the user's and are not donated.
    """
    return _local_of(outer, outer.local_step, outer.apply, params, state, None, donate=(1,))


def _local_of(
    outer: OuterOptimizer,
    local_step: Callable[..., tuple[PyTree, OuterState, Outgoing]],
    apply_correction: Callable[..., tuple[PyTree, OuterState]],
    params: PyTree,
    state: OuterState,
    whole: Any,
    donate: tuple[int, ...],
) -> LocalPrograms:
    """Build the programs of two transitions of an outer optimizer whose groups exchange.

    Args:
      local_step: (params, state) -> (params, state, Outgoing), of which the last has no axis of replicas.
      apply_correction: (params, state, Arrived, number) -> (params, state); likewise.
      params, state: shapes, dtypes and shardings.
      whole: the sharding of messages; None: as the compiler chooses.
    """
    wire: Wire | Modulo = outer.steps.exchange.wire  # type: ignore[attr-defined]
    placed = shardings_of((params, state))
    message = jax.eval_shape(local_step, params, state)[2].message
    dims = outer.steps.fragments.block_dims(message)

    def step(params: PyTree, state: OuterState) -> Any:
        params, state, (message, movement, windows) = local_step(params, state)
        if isinstance(wire, Modulo):
            sent = propose(wire, message, movement, windows, dims), message
        else:
            sent = encode(wire, message, dims)
        return params, state, sent, optax.tree.norm(message)

    def apply(params: PyTree, state: OuterState, correction: PyTree, number: jax.Array) -> Any:
        correction, windows = correction if isinstance(wire, Modulo) else (correction, None)
        return apply_correction(params, state, Arrived(correction, windows), number)

    sent = jax.eval_shape(step, params, state)[2]
    payload, correction = sent, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), message)
    if isinstance(wire, Modulo):
        windows = sent[0]
        codes = jax.eval_shape(lambda m, w: encode_in(wire, m, w, jnp.int32(0), dims), message, windows)
        payload, correction = (windows, codes), (correction, windows)
    return LocalPrograms(
        step=jax.jit(step, donate_argnums=donate, out_shardings=(*placed, whole, whole)),
        apply=jax.jit(apply, donate_argnums=donate, out_shardings=placed),
        message=message,
        payload=payload,
        correction=correction,
        wire=wire,
        dims=dims,
    )


def compile_local(local: LocalPrograms, params: PyTree, state: OuterState | None, at_once: int = 1) -> LocalPrograms:
    """Compile the programs for these shapes, dtypes and shardings, so many at once."""
    lowered = (
        Lowered("step", local.step.lower(params, state)),  # type: ignore[attr-defined]
        Lowered("apply", local.apply.lower(params, state, local.correction, NUMBER)),  # type: ignore[attr-defined]
    )
    compiled = compile_all(lowered, at_once)
    step, apply = compiled["step"].program, compiled["apply"].program
    taken = apply.input_shardings[0][2]
    correction = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), local.correction, taken
    )
    return replace(local, step=step, apply=apply, correction=correction)


def at_rest(local: LocalPrograms, programs: Programs) -> LocalPrograms:
    """Return compiled programs that take and return the outer state as it lies between steps."""
    return replace(local, step=from_host_memory(local.step, programs), apply=from_host_memory(local.apply, programs))
