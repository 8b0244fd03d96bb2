"""The HLO reader on compiled programs whose collectives are known."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from noloco_jax.spmd.hlo import Traffic, read_hlo
from support.traffic import CUBE, only


def cube_of(order: list[int]) -> Mesh:
    devices = np.array(jax.devices())[order].reshape(2, 2, 2)
    return Mesh(devices, tuple(CUBE), axis_types=(AxisType.Auto,) * 3)


def traffic_of(body: Callable[..., Any], mesh: Mesh) -> Traffic:
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("a", "b", "c"), out_specs=P("a", "b", "c"), check_vma=False)
    hlo = jax.jit(mapped).lower(jax.ShapeDtypeStruct((8, 8, 8), jnp.float32)).compile().as_text()
    assert hlo is not None
    return read_hlo(hlo, CUBE)


def shift(x: jax.Array, axis: str) -> jax.Array:
    return lax.ppermute(x, axis, [(0, 1), (1, 0)])


BLOCK = 4 * 4**3  # bytes on a device
OPERATIONS = {
    "all-reduce": lax.psum,
    "all-gather": partial(lax.all_gather, tiled=True),
    "all-to-all": partial(lax.all_to_all, split_axis=0, concat_axis=1, tiled=True),
    "collective-permute": shift,
}


@pytest.mark.parametrize("axis", CUBE)
@pytest.mark.parametrize("kind", OPERATIONS)
def test_a_collective_over_one_axis_crosses_it_alone(kind, axis):
    collective = only(traffic_of(lambda x: OPERATIONS[kind](x, axis), cube_of(list(range(8)))))
    assert (collective.kind, collective.axes, collective.bytes) == (kind, (axis,), BLOCK)


@pytest.mark.parametrize("axes", [("a", "b"), ("a", "c"), ("b", "c"), ("a", "b", "c")])
def test_a_sum_over_several_axes_crosses_them(axes):
    assert only(traffic_of(lambda x: lax.psum(x, axes), cube_of(list(range(8))))).axes == axes


def test_axes_do_not_depend_on_the_order_of_the_meshs_devices():
    assert only(traffic_of(lambda x: lax.psum(x, "b"), cube_of([5, 3, 0, 6, 1, 7, 2, 4]))).axes == ("b",)


def test_a_routed_message_in_a_loop_crosses_both_axes_once_per_iteration():
    ring = [(i, (i + 1) % 4) for i in range(4)]  # (a, b): 0 1 2 3
    cross = [(0, 3), (3, 0), (1, 2), (2, 1)]

    def body(x):
        def turn(x, route):
            send = [partial(lax.ppermute, axis_name=("a", "b"), perm=perm) for perm in (ring, cross)]
            return jnp.sin(lax.switch(route, send, x)), None

        return lax.scan(turn, x, lax.axis_index("c") + jnp.arange(5))[0]

    traffic = traffic_of(body, cube_of(list(range(8))))
    collective = only(traffic)
    assert (collective.kind, collective.axes) == ("collective-permute", ("a", "b"))
    assert traffic.times(collective) == (5, 5) and traffic.num_branches(collective) == 2
