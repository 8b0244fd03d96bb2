"""Permutations of devices' arrays, in which swaps may travel as sums.

Between CPU devices of several processes, gloo carries the two directions of a swap one after the other: the
announcement that a device can receive waits behind the data that it sends on the same connection. A sum over the two
devices carries both directions at once. In words that wrap, the sum less the own words is the partner's words: the same
bits. With 4 MB over 20 Mbit/s `ppermute` takes 3.2 s and the sum 1.7 s, where the link needs 1.6 s (jax 0.10.2 and
0.12.0.1). From some 3 Gbit/s on, `ppermute` is faster. NCCL sends and receives at once, so GPUs always use `ppermute`.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Destination of a device that sends nothing.
NOWHERE = -1
# Messages up to this size leave a socket's buffer at once, so that no announcement waits behind them; a permutation
# takes one round trip, a sum two.
SMALL_BYTES = 2**16
# The forms are compared by messages as large as the run's, up to some seconds or 16 MiB, since a socket's buffer may
# take a shorter one whole: then no announcement waits, and the permutation seems as fast as the sum.
_FIRST_PROBE_BYTES, _MAX_PROBE_BYTES = 2**19, 2**24
_PROBE_SECONDS = 2.0
_MORE_PROBES = 6  # if they are quick, as noise is then a larger part; the fastest counts
_QUICK = 0.1  # seconds
# What a permutation must take of a sum's time to be chosen: it may take twice as long, and gains a round trip at most.
_CLEARLY_FASTER = 0.8
_sums_are_faster = True  # between the processes; the trainer measures it by `choose_form`


def move(x: jax.Array, destinations: Sequence[int], device_axes: tuple[str, ...]) -> jax.Array:
    """Send an array of every device to its destination; a device to which nobody sends receives zeros.

    Args:
      x: the array of this device.
      destinations: device -> device or `NOWHERE`; each device at most once.
      device_axes: the mesh axes in the order in which devices are numbered.
    """
    if list(destinations) == list(range(len(destinations))):
        return x
    # `psum` over groups is not implemented where shard_map tracks what varies (check_vma=True; jax 0.10.2, 0.12.0.1).
    is_tracked = bool(jax.typeof(lax.axis_index(device_axes)).mat.varying)
    is_large = x.size * x.dtype.itemsize > SMALL_BYTES
    if is_large and _sums_are_faster and is_between_cpus() and not is_tracked:
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
    words = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
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


def is_between_cpus() -> bool:
    """Return True while a program for CPU devices of several processes is traced."""
    return is_for_cpus() and jax.process_count() > 1


def choose_form(mesh: Mesh, num_bytes: int) -> str | None:
    """Time a swap in both forms between the processes of a mesh; programs traced from now on use the better one.

    All processes call this with the same arguments, and choose alike. It is the sum unless the permutation is faster by
    a fifth.

    Args:
      mesh: devices of the exchange.
      num_bytes: size of the run's messages; as much of it is swapped as takes some two seconds, at most 16 MiB.

    Returns:
      A line for people; None if there is nothing to choose: messages are small, or not between CPU devices of several
      processes.
    """
    global _sums_are_faster
    devices = list(mesh.devices.flat)
    is_between_cpus = devices[0].platform == "cpu" and len({device.process_index for device in devices}) > 1
    if num_bytes <= SMALL_BYTES or not is_between_cpus or mesh.shape["replica"] == 1:
        return None
    length, longest = min(num_bytes, _FIRST_PROBE_BYTES) // 4, min(num_bytes, _MAX_PROBE_BYTES) // 4
    seconds = _seconds_of_forms(mesh, length)
    longer = min(longest, int(length * _PROBE_SECONDS / seconds.max()))
    if longer > length:
        length, seconds = longer, _seconds_of_forms(mesh, longer)
    by_permutation, by_sum = seconds
    _sums_are_faster = bool(by_permutation > _CLEARLY_FASTER * by_sum)
    return (
        f"pairs swap by {'sums' if _sums_are_faster else 'permutations'}: {4 * length / 1e6:.2g} MB take "
        f"{by_permutation:.2g} s by a permutation, {by_sum:.2g} s by a sum"
    )


def _seconds_of_forms(mesh: Mesh, length: int) -> np.ndarray:
    """Return the seconds that a permutation and a sum of `length` floats take in the slowest process."""
    programs = [_swap_program(form, mesh, length) for form in (_move, move_by_sums)]

    def slowest() -> np.ndarray:
        seconds = np.array([program() for program in programs], np.float32)
        return np.max(np.reshape(multihost_utils.process_allgather(seconds), (-1, 2)), axis=0)

    seconds = slowest()
    if seconds.max() < _QUICK:
        seconds = np.min([seconds, *(slowest() for _ in range(_MORE_PROBES))], axis=0)
    return seconds


def _swap_program(form: Callable[..., jax.Array], mesh: Mesh, length: int) -> Callable[[], float]:
    """Return a function that swaps `length` floats between the halves of the replica axis, and returns its seconds."""
    number, spec = mesh.shape["replica"], P(mesh.axis_names)
    half = number // 2
    destinations = [*range(half, 2 * half), *range(half), *range(2 * half, number)]
    body = partial(form, destinations=destinations, device_axes=("replica",))
    swap = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))

    def compiled(length: int) -> Callable[[], Any]:
        ones = jax.make_array_from_callback(
            (mesh.size, length), NamedSharding(mesh, spec), lambda _: np.ones((1, length), np.float32)
        )
        program = swap.lower(ones).compile()
        return lambda: program(ones).block_until_ready()

    small, large = compiled(1), compiled(length)

    def run() -> float:
        small()  # connects the devices, and waits for what is still on the link
        started = time.perf_counter()
        large()
        return time.perf_counter() - started

    return run
