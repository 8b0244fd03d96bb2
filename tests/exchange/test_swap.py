"""Permutations of devices' arrays whose swaps travel as sums."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from noloco_jax.exchange.swap import NOWHERE, move_by_sums

DEVICES = 8
DESTINATIONS = {
    "all in pairs": [1, 0, 7, 5, 6, 3, 4, 2],
    "pairs, a ring and one that stays": [3, 4, 2, 0, 6, 7, 1, 5],
    "a pair, others stay": [0, 6, 2, 3, 4, 5, 1, 7],
    "a pair, others send to nobody": [1, 0, *[NOWHERE] * 6],
    "a pair and a chain": [1, 0, 3, 4, NOWHERE, NOWHERE, NOWHERE, NOWHERE],
    "a ring": [1, 2, 3, 4, 5, 6, 7, 0],
}


@pytest.mark.parametrize("destinations", DESTINATIONS.values(), ids=DESTINATIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.uint8, np.int8])
def test_sums_deliver_the_bits_of_every_array_to_its_destination(destinations, dtype):
    bits = np.random.default_rng(0).integers(0, 256, (DEVICES, 3, 5 * np.dtype(dtype).itemsize), dtype=np.uint8)
    values = bits.view(dtype)  # every pattern of bits: NaNs with their payloads, infinities, subnormal numbers, zeros
    expected = np.zeros_like(bits)
    for source, to in enumerate(destinations):
        if to != NOWHERE:
            expected[to] = bits[source]
    mesh = jax.make_mesh((DEVICES,), ("replica",), (AxisType.Auto,))
    body = partial(move_by_sums, destinations=destinations, device_axes=("replica",))
    moved = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"), check_vma=False))
    np.testing.assert_array_equal(np.asarray(moved(values)).view(np.uint8), expected)
