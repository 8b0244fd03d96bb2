"""Elastic resume from a checkpoint with another number of replicas or another padding of the vocabulary."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from noloco_jax.checkpoint.saved import Saved, SavedShape
from noloco_jax.config import ModelConfig
from noloco_jax.data import redistribute, renumbered
from noloco_jax.errors import UserError
from noloco_jax.spmd.programs import Programs, TrainState
from noloco_jax.spmd.stages import resize_vocabulary

PyTree = Any


def check_elastic(elastic: str, num_replicas: int, saved: SavedShape) -> None:
    """Check that the field `elastic` says how to convert a checkpoint's replicas to the run's.

    Raises:
      UserError: if the numbers of replicas differ and it does not.
    """
    before, after = saved.num_replicas, num_replicas
    fitting = "merge" if after < before else "copy"
    if before == after or elastic == fitting:
        return
    raise UserError(
        f"the checkpoint has num_replicas={before}, the config has {after} and elastic={elastic!r}: give "
        f"--config.elastic={fitting} to make {after} of the {before}, or --config.num_replicas={before}, or another "
        "--workdir"
    )


def data_positions(saved: Saved, num_replicas: int) -> list[dict]:
    """Return the data position of each of `num_replicas` replicas, redistributed if their number has changed.

    See `data.redistribute`. For an island, which is one replica of several, the rest of its own share is redistributed.
    """
    positions = saved.positions
    if positions[0]["num_replicas"] != len(positions):
        positions = [renumbered(position, replica, len(positions)) for replica, position in enumerate(positions)]
    return redistribute(positions, num_replicas)


def restore(saved: Saved, model: ModelConfig, programs: Programs, elastic: str) -> tuple[TrainState, str]:
    """Restore a state to where it stays between steps on this run's mesh; return it and a line on what was converted.

    If sizes differ, arrays are read and converted one after another, so that there is never more than one array of the
    saved state beside the run's own state.

    With fewer replicas, replica j of M becomes the mean of the replicas i with i mod M = j, in weights, slow weights
    and all optimizer state. With more, replica j of M is a copy of replica j mod N.

    Raises:
      UserError: see `check_elastic`.
    """
    then, now = saved.shape, SavedShape.of(model, programs.state)
    check_elastic(elastic, now.num_replicas, then)
    if then == now:
        return programs.moved_to_rest(saved.state(programs.state)), ""
    state = saved.each(_saved_shapes(model, programs, then), _conversions(model, programs, then))
    if then.num_replicas == now.num_replicas:
        sizes = f"{now.padded_vocab_size} tokens, before {then.padded_vocab_size}"
        return state, f"the vocabulary is padded to {sizes}"
    return state, _report(then.num_replicas, now.num_replicas, elastic)


def _report(before: int, after: int, elastic: str) -> str:
    made = f"replica j of {after} is the mean of those with number j modulo {after}"
    if after > before:
        made = f"replica j of {after} is a copy of replica j modulo {before}"
    return (
        f"elastic={elastic!r}: {before} replicas become {after}, {made}; their remaining data is "
        "redistributed, nothing skipped or repeated"
    )


def _saved_shapes(model: ModelConfig, programs: Programs, saved: SavedShape) -> TrainState:
    """Return the saved shapes, sharded over all devices of the run's mesh along a dimension that these divide."""

    def shapes(state: TrainState) -> TrainState:
        resized = resize_vocabulary(model, state, saved.padded_vocab_size)
        if programs.outer is not None:  # its windows are of blocks of tokens
            anew: Any = jax.vmap(programs.outer.optimizer.init)(resized.params)  # Optax's type of a state is any tree
            resized = resized._replace(outer=resized.outer._replace(windows=anew.windows))
        return jax.tree.map(lambda x: jnp.zeros((saved.num_replicas, *x.shape[1:]) if x.ndim else (), x.dtype), resized)

    everywhere = Mesh(programs.mesh.devices.reshape(-1), ("device",), axis_types=(AxisType.Auto,))

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec: list[str | None] = [None] * len(x.shape)
        if fitting := [dim for dim, size in enumerate(x.shape) if size % everywhere.size == 0]:
            spec[max(fitting, key=lambda dim: x.shape[dim])] = "device"
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(everywhere, P(*spec)))

    return jax.tree.map(placed, jax.eval_shape(shapes, programs.state))


def _conversions(model: ModelConfig, programs: Programs, saved: SavedShape) -> PyTree:
    """Return a `TrainState` of functions that convert each saved array to the run's array at rest."""
    mine = SavedShape.of(model, programs.state)

    @functools.cache  # moments and slow weights share the programs of their parameters
    def program(shape: tuple[int, ...], sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
        def converted(x: jax.Array) -> jax.Array:
            if not x.ndim:  # scalars are shared by all replicas
                return x
            return _cut_or_padded(_convert_rows(x, saved.num_replicas, mine.num_replicas), shape)

        return jax.jit(converted, out_shardings=sharding)

    def conversion(x: jax.ShapeDtypeStruct, between_steps: jax.ShapeDtypeStruct):
        convert = program(x.shape, x.sharding)
        return lambda array: jax.device_put(convert(array), between_steps.sharding)

    return jax.tree.map(conversion, programs.state, programs.between_steps)


def _cut_or_padded(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Cut an array along its tokens, or blocks of them, or pad it with zeros there, to a shape."""
    kept = x[tuple(map(slice, shape))]
    return jnp.pad(kept, [(0, size - had) for size, had in zip(shape, kept.shape, strict=True)])


def _convert_rows(x: jax.Array, before: int, after: int) -> jax.Array:
    """Convert the rows of `before` replicas to rows of `after` replicas."""
    if after == before:
        return x
    if after > before:
        return x[np.arange(after) % before]
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x[:after]

    def mean(of: jax.Array) -> jax.Array:
        first = of[:1].astype(jnp.float32)
        return first + jnp.mean(of.astype(jnp.float32) - first, axis=0, keepdims=True)  # exact where all are equal

    return jnp.concatenate([mean(x[j::after]) for j in range(after)]).astype(x.dtype)
