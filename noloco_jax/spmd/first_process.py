"""Whole arrays between the host of a run's first process and the devices of all its processes.

Every process has to make the same calls in the same order, as the arrays pass through the processes' own collectives.
With one process they are copies from and to its devices.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def to_first_process(arrays: Sequence[Any]) -> list[np.ndarray]:
    """Copy arrays to the host of the first process.

    Arrays that lie on several processes pass through a device one after another. The other processes call this too and
    get an empty list, but where all arrays lie on their own devices: then every process gets copies.

    Args:
      arrays: arrays of JAX or NumPy; those that lie on several processes with a `NamedSharding`.

    Returns:
      Copies that nobody will change.
    """
    if all(not isinstance(x, jax.Array) or x.is_fully_addressable for x in arrays):
        return [np.array(x) for x in jax.device_get(list(arrays))]
    copies = []
    for x in arrays:
        whole = x if x.is_fully_replicated else _replicated(x.sharding.mesh)(jax.device_put(x, _on_device(x.sharding)))
        if jax.process_index() == 0:
            copies.append(np.array(whole.addressable_data(0)))
        del whole  # a device holds one whole array at a time
    return copies


def from_first_process(arrays: Sequence[np.ndarray | None], likes: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
    """Place arrays of the first process on the devices of all, bitwise, one after another.

    Args:
      arrays: in the first process the arrays; in others they are not read.
      likes: their shapes, dtypes and shardings; without a sharding, an array of a process that is alone stays as it is.
    """
    if all(like.sharding is None or like.sharding.is_fully_addressable for like in likes):
        pairs = zip(arrays, likes, strict=True)
        return [x if like.sharding is None else jax.device_put(x, like.sharding) for x, like in pairs]
    given = arrays if jax.process_index() == 0 else [None] * len(likes)
    return [_placed(x, like) for x, like in zip(given, likes, strict=True)]


def _placed(x: np.ndarray | None, like: jax.ShapeDtypeStruct) -> jax.Array:
    assert isinstance(like.sharding, NamedSharding) and isinstance(like.sharding.mesh, Mesh)
    mesh, bits = like.sharding.mesh, np.dtype(f"u{np.dtype(like.dtype).itemsize}")
    parts = NamedSharding(mesh, P(mesh.axis_names))
    here = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    own = [jnp.zeros((1, *like.shape), bits, device=device) for device in here]
    if x is not None:
        own[0] = jax.device_put(np.ascontiguousarray(x).reshape(like.shape).view(bits)[None], here[0])
    of_all = jax.make_array_from_single_device_arrays((mesh.size, *like.shape), parts, own)
    whole = _summed(np.dtype(like.dtype), _on_device(like.sharding))(of_all)
    return jax.block_until_ready(jax.device_put(whole, like.sharding))  # before the next array takes memory


@functools.cache
def _replicated(mesh: Mesh) -> Any:
    def copy(x: jax.Array) -> jax.Array:
        return x

    return jax.jit(copy, out_shardings=NamedSharding(mesh, P()))


@functools.cache
def _summed(dtype: np.dtype, sharding: NamedSharding) -> Any:
    """Return a program that adds up the parts of all devices, all but one of them zeros, as integers."""

    def summed(parts: jax.Array) -> jax.Array:
        total = jnp.sum(parts, axis=0, dtype=parts.dtype)
        return jax.lax.bitcast_convert_type(total, dtype)

    return jax.jit(summed, out_shardings=sharding)


def _on_device(sharding: Any) -> NamedSharding:
    """Return the sharding in the devices' own memory, in which programs compute."""
    return NamedSharding(sharding.mesh, sharding.spec)
