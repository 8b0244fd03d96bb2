"""Collectives read from the jaxpr of programs whose communication is known."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from noloco_jax.spmd.traffic import Collective, bytes_sent, collectives_of

SHAPE = {"replica": 4, "stage": 2, "fsdp": 1}
BLOCK = 4 * 2 * 4 * 8  # bytes on a device


def read(body: Callable[[jax.Array], Any]) -> list[Collective]:
    mesh: Any = AbstractMesh(tuple(SHAPE.values()), tuple(SHAPE), axis_types=(AxisType.Auto,) * len(SHAPE))
    spec = P("replica", "stage")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return collectives_of(jax.jit(mapped), (jax.ShapeDtypeStruct((8, 8, 8), jnp.float32),), SHAPE)


def ring(x: jax.Array, *, axes: Any = "replica", number: int = 4) -> jax.Array:
    return lax.ppermute(x, axes, [(i, (i + 1) % number) for i in range(number)])


@pytest.mark.parametrize(
    ("body", "operation", "axes", "sent"),
    [
        (ring, "ppermute", ("replica",), BLOCK),
        (lambda x: lax.ppermute(x, "replica", [(0, 1), (1, 0), (2, 2)]), "ppermute", ("replica",), BLOCK / 2),
        (partial(ring, axes="stage", number=2), "ppermute", ("stage",), 0),
        (partial(ring, axes=("replica", "stage"), number=8), "ppermute", ("replica", "stage"), BLOCK / 2),
        (lambda x: lax.psum(x, "replica"), "psum", ("replica",), 2 * BLOCK * 3 / 4),  # a ring, there and back
        (lambda x: lax.psum(x, "stage"), "psum", ("stage",), 0),
        (lambda x: lax.psum(x, "replica", axis_index_groups=[[0, 3], [1], [2]]), "psum", ("replica",), BLOCK / 2),
        (lambda x: lax.all_gather(x, "replica")[0], "all_gather", ("replica",), 3 * BLOCK),
        (lambda x: lax.psum_scatter(x, "replica", scatter_dimension=1), "reduce_scatter", ("replica",), BLOCK * 3 / 4),
    ],
)
def test_a_collective_sends_its_bytes_to_other_replicas_only(body, operation, axes, sent):
    (found,) = read(body)
    assert (found.operation, found.axes, found.bytes, found.sent, found.times) == (operation, axes, BLOCK, sent, 1)


def test_collectives_in_loops_count_once_per_iteration_and_in_branches_by_the_mean():
    def body(x):
        def turn(x, route):
            return jnp.sin(lax.switch(route, [ring, lambda x: x, ring, lambda x: x], x)), None

        return lax.scan(turn, x, jnp.arange(6))[0]

    found = read(body)
    assert [one.times for one in found] == [1.5, 1.5]  # six iterations, two of four branches
    assert bytes_sent(found) == 3 * BLOCK


def test_the_backward_pass_is_counted():
    found = read(jax.grad(lambda x: jnp.sum(jnp.sin(ring(jnp.sin(x))))))
    assert [one.operation for one in found] == ["ppermute", "ppermute"]


def test_a_collective_over_axes_of_one_device_is_none():
    assert read(lambda x: lax.psum(x, "fsdp")) == []


def test_a_collective_in_a_loop_of_unknown_length_is_refused():
    with pytest.raises(ValueError, match="ppermute is in a loop of unknown length"):
        read(lambda x: lax.while_loop(lambda x: x.sum() < 0, ring, x))
