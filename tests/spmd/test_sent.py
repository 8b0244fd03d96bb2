"""What programs send between replicas, counted by hand for programs of a few messages."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from noloco_jax.spmd.sent import bytes_between_replicas

N, S = 4, 3  # replicas and stages
SHAPE = {"replica": N, "stage": S}
ROW = 4 * 8  # bytes of a device's array
RING = [(i, (i + 1) % N) for i in range(N)]
SWAP = [(0, 1), (1, 0), (2, 2), (3, 3)]  # two of four stay where they are


def sent(body: Callable[[jax.Array, jax.Array], Any], values: Any = range(3)) -> list[int]:
    """What all replicas send in a program of (an array of 8 numbers a device, a number)."""
    mesh = AbstractMesh((N, S), ("replica", "stage"), axis_types=(AxisType.Auto,) * 2)
    specs = {"in_specs": (P(("replica", "stage")), P()), "out_specs": P(("replica", "stage")), "check_vma": False}
    program = jax.jit(jax.shard_map(body, mesh=mesh, **specs))
    arguments = jnp.zeros((N * S * 8,)), jnp.int32(0)
    return bytes_between_replicas(program.trace(*arguments).jaxpr, 1, values, SHAPE).tolist()


def send(x: jax.Array, pairs: Any = RING, axes: Any = "replica") -> jax.Array:
    return lax.ppermute(x, axes, pairs)


def test_a_message_counts_on_every_stage_and_what_a_replica_sends_itself_does_not():
    assert sent(lambda x, _: send(x)) == [N * S * ROW] * 3
    assert sent(lambda x, _: send(x, SWAP)) == [2 * S * ROW] * 3


def test_of_messages_between_stages_those_to_other_replicas_count():
    to_next_stage = [(i * S, i * S + 1) for i in range(N)]
    to_next_replica = [(i * S, (i + 1) % N * S + 1) for i in range(N)]
    assert sent(lambda x, _: send(x, to_next_stage, ("replica", "stage"))) == [0] * 3
    assert sent(lambda x, _: send(x, to_next_replica, ("replica", "stage"))) == [N * ROW] * 3
    assert sent(lambda x, _: lax.psum(x, "stage") + send(x, [(0, 1)], "stage")) == [0] * 3


@pytest.mark.parametrize(
    ("collective", "each"),
    [
        (partial(lax.psum, axis_name="replica"), 2 * ROW * (N - 1) // N),
        (partial(lax.all_gather, axis_name="replica"), ROW * (N - 1)),
        (partial(lax.psum_scatter, axis_name="replica", tiled=True), ROW * (N - 1) // N),
        (partial(lax.all_to_all, axis_name="replica", split_axis=0, concat_axis=0, tiled=True), ROW * (N - 1) // N),
    ],
    ids=["all-reduce", "all-gather", "reduce-scatter", "all-to-all"],
)
def test_other_collectives_count_as_rings(collective, each):
    assert sent(lambda x, _: jnp.broadcast_to(jnp.sum(collective(x)), x.shape)) == [N * S * each] * 3


def test_the_programs_own_integers_choose_the_branch():
    table = np.array([2, 0, 1], np.int32)
    branches = [lambda x: x, send, lambda x: send(send(x), SWAP)]

    def body(x: jax.Array, value: jax.Array) -> jax.Array:
        return lax.switch(jnp.asarray(table)[(value * 5) % 3], branches, x)

    by_branch = [0, N * S * ROW, (N + 2) * S * ROW]
    assert sent(body, range(7)) == [by_branch[table[value * 5 % 3]] for value in range(7)]


def test_a_loop_counts_its_passes_and_its_gradient_sends_back_what_it_sent():
    def loop(x: jax.Array, value: jax.Array) -> jax.Array:
        def one(x: jax.Array, place: jax.Array) -> tuple[jax.Array, None]:
            return lax.cond(place % 2 == 0, send, lambda x: jnp.sin(x), x), None

        return lax.scan(one, x, value + jnp.arange(5))[0]

    forward = [N * S * ROW * times for times in (3, 2, 3)]
    assert sent(loop) == forward
    there_and_back = sent(lambda x, value: jax.grad(lambda x: jnp.sum(jnp.sin(loop(x, value))))(x))
    assert there_and_back == [2 * number for number in forward]


def test_bytes_are_exact_beyond_what_32_bits_hold():
    def body(x: jax.Array, value: jax.Array) -> jax.Array:
        return lax.cond(value > 1, lambda x: lax.scan(lambda x, _: (send(x), None), x, length=10**8)[0], send, x)

    assert sent(body) == [N * S * ROW] * 2 + [N * S * ROW * 10**8]


def test_what_cannot_be_known_is_refused():
    def repeated(x: jax.Array, value: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: x[0] < 1, send, x)

    def by_a_float(x: jax.Array, value: jax.Array) -> jax.Array:
        return lax.cond(x[0] < 1, send, lambda x: x, x)

    with pytest.raises(ValueError, match="in a while: how often they are sent is not known"):
        sent(repeated)
    with pytest.raises(ValueError, match="which branch of a conditional sends messages does not follow"):
        sent(by_a_float)
    groups = [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="how much psum"):
        sent(lambda x, _: lax.psum(x, "replica", axis_index_groups=groups))
