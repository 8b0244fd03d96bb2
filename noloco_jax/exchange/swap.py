"""Permutations of devices' arrays, in which swaps may travel as sums.

Between CPU devices of several processes, gloo carries the two directions of a swap one after the other: the announcement
that a device can receive waits behind the data that it sends on the same connection. A sum over the two devices carries
both directions at once. In words that wrap, the sum less the own words is the partner's words: the same bits. With 4 MB
over 20 Mbit/s `ppermute` takes 3.2 s and the sum 1.7 s, where the link needs 1.6 s (jax 0.10.2 and 0.12.0.1). From some
3 Gbit/s on, `ppermute` is faster. NCCL sends and receives at once, so GPUs always use `ppermute`.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Destination of a device that sends nothing.
NOWHERE = -1
# Largest message by which the forms are compared, and how often each is timed.
PROBE_BYTES, PROBES = 2**20, 2
_sums_are_faster = True  # between this run's processes; `choose_form` measures it


def move(x: jax.Array, destinations: Sequence[int], device_axes: tuple[str, ...]) -> jax.Array:
    """Send an array of every device to its destination; a device to which nobody sends receives zeros.

    Args:
      x: the array of this device.
      destinations: device -> device or `NOWHERE`; each device at most once.
      device_axes: the mesh axes in the order in which devices are numbered.
    """
    if list(destinations) == list(range(len(destinations))):
        return x
    if _sums_are_faster and is_for_cpus() and jax.process_count() > 1:
        return move_by_sums(x, destinations, device_axes)
    return _move(x, destinations, device_axes)


def _move(x: jax.Array, destinations: Sequence[int], device_axes: tuple[str, ...]) -> jax.Array:
    return lax.ppermute(x, device_axes, [(i, to) for i, to in enumerate(destinations) if to != NOWHERE])


def move_by_sums(x: jax.Array, destinations: Sequence[int], device_axes: tuple[str, ...]) -> jax.Array:
    """Do the same as `move`, with every swap of two devices as their sum."""
    number = len(destinations)
    partners = [to if to not in (i, NOWHERE) and destinations[to] == i else i for i, to in enumerate(destinations)]
    is_swapped = np.array(partners) != np.arange(number)
    if not is_swapped.any():
        return _move(x, destinations, device_axes)
    # Bytes, not 16-bit words: XLA's CPU compiler would widen the sum of those to 32 bits.
    words = lax.bitcast_convert_type(x, jnp.uint32 if x.dtype.itemsize == 4 else jnp.uint8)
    groups = [sorted({i, partner}) for i, partner in enumerate(partners) if i <= partner]
    theirs = lax.bitcast_convert_type(lax.psum(words, device_axes, axis_index_groups=groups) - words, x.dtype)
    if is_swapped.all():
        return theirs
    others = [NOWHERE if swapped else to for swapped, to in zip(is_swapped, destinations, strict=True)]
    stay = all(swapped or to == i for i, (swapped, to) in enumerate(zip(is_swapped, destinations, strict=True)))
    rest = x if stay else _move(x, others, device_axes)
    return jnp.where(jnp.asarray(is_swapped)[lax.axis_index(device_axes)], theirs, rest)


def is_for_cpus() -> bool:
    """Return True while a program for a mesh of CPU devices is traced."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform == "cpu"


def choose_form(mesh: Mesh, num_bytes: int) -> str | None:
    """Time a swap in both forms between the processes of a mesh; programs traced from now on use the faster one.

    All processes call this with the same arguments, and choose alike.

    Args:
      mesh: CPU devices of the exchange, with an axis `replica`.
      num_bytes: size of the run's messages; the measured swap has at most `PROBE_BYTES`.

    Returns:
      A line for people; None if the exchange does not cross processes of CPU devices.
    """
    global _sums_are_faster
    devices = mesh.devices.flat
    if devices[0].platform != "cpu" or len({device.process_index for device in devices}) == 1:
        return None
    number, length = mesh.shape["replica"], max(min(num_bytes, PROBE_BYTES) // 4, 1)
    half = number // 2
    destinations = [*range(half, 2 * half), *range(half), *range(2 * half, number)]
    spec = P(mesh.axis_names)
    sharding = NamedSharding(mesh, spec)
    ones = jax.make_array_from_callback((mesh.size, length), sharding, lambda index: np.ones((1, length), np.float32))

    def seconds(form: Callable[..., jax.Array]) -> float:
        body = partial(form, destinations=destinations, device_axes=("replica",))
        program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        program(ones).block_until_ready()  # compiles and connects
        taken = []
        for _ in range(PROBES):
            started = time.perf_counter()
            program(ones).block_until_ready()
            taken.append(time.perf_counter() - started)
        return min(taken)

    own = np.array([seconds(_move), seconds(move_by_sums)])
    by_permutation, by_sums = np.max(multihost_utils.process_allgather(own), axis=0).tolist()
    _sums_are_faster = by_sums < by_permutation
    chosen = "sums" if _sums_are_faster else "permutations"
    return (
        f"pairs swap by {chosen}: {4 * length / 1e6:.2g} MB took {by_permutation:.2g} s by a permutation and "
        f"{by_sums:.2g} s by a sum"
    )
