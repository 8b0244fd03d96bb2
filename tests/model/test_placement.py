"""Functions that are mapped over the shards of a replica's arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from noloco_jax.model.placement import look_up, map_shards

HEADS, ROWS = ("fsdp", None, "tensor", None), ("fsdp", None)


def mixed(q_BTHK, k_BTGK, scale_BT):
    """Mix positions as attention does, each head and each sequence separately."""
    groups = q_BTHK.shape[2] // k_BTGK.shape[2]
    return q_BTHK * jnp.cumsum(jnp.repeat(k_BTGK, groups, axis=2), axis=1) * scale_BT[..., None, None]


@pytest.mark.parametrize(
    ("batch", "kv_heads", "part"),
    [(4, 2, (2, 5, 2, 3)), (4, 1, (2, 5, 4, 3)), (3, 2, (3, 5, 2, 3))],
    ids=["cut both ways", "heads cannot be cut", "batch cannot be cut"],
)
def test_every_device_computes_its_shard_and_results_equal_the_whole(batch, kv_heads, part):
    rng = np.random.default_rng(0)
    q_NBTHK = jnp.asarray(rng.normal(size=(2, batch, 5, 4, 3)), jnp.float32)
    k_NBTGK = jnp.asarray(rng.normal(size=(2, batch, 5, kv_heads, 3)), jnp.float32)
    scale_BT = jnp.asarray(rng.normal(size=(batch, 5)), jnp.float32)
    seen = []

    def noted(q_BTHK, k_BTGK, scale_BT):
        seen.append((q_BTHK.shape, scale_BT.shape))
        return mixed(q_BTHK, k_BTGK, scale_BT)

    def of_replica(q_1BTHK, k_1BTGK):
        return jnp.sin(map_shards(noted, (q_1BTHK[0], HEADS), (k_1BTGK[0], HEADS), (scale_BT, ROWS)))[None]

    mesh = jax.make_mesh((2, 2, 2), ("replica", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    sharded = jax.shard_map(
        of_replica, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"), axis_names={"replica"}, check_vma=False
    )
    expected = jax.vmap(lambda q, k: jnp.sin(mixed(q, k, scale_BT)))
    np.testing.assert_allclose(jax.jit(sharded)(q_NBTHK, k_NBTGK), expected(q_NBTHK, k_NBTGK), rtol=1e-5, atol=1e-6)
    assert set(seen) == {(part, part[:2])}

    def gradients(fn):
        return jax.jit(jax.grad(lambda q, k: fn(q, k).sum(), argnums=(0, 1)))(q_NBTHK, k_NBTGK)

    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, gradients(sharded), gradients(expected))


def test_map_shards_without_a_mesh_is_the_function_itself():
    q_BTHK, k_BTGK, scale_BT = jnp.ones((1, 2, 2, 3)), jnp.ones((1, 2, 1, 3)), jnp.ones((1, 2))
    mapped = map_shards(mixed, (q_BTHK, HEADS), (k_BTGK, HEADS), (scale_BT, ROWS))
    np.testing.assert_array_equal(mapped, mixed(q_BTHK, k_BTGK, scale_BT))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_gradient_of_a_lookup_counts_a_frequent_token_exactly(dtype):
    """A sum in bfloat16 stops growing at 256, one in float16 at 2048."""
    counts = [16384, 1000, 24, 0]
    ids_BT = jnp.asarray(np.repeat(np.arange(4), counts).reshape(16, -1))
    of_table = jax.grad(lambda table_VD: look_up(table_VD, ids_BT, dtype).sum(dtype=jnp.float32))
    gradient = of_table(jnp.ones((4, 3), dtype))
    assert gradient.dtype == dtype
    np.testing.assert_array_equal(gradient, np.broadcast_to(np.array(counts)[:, None], (4, 3)))
