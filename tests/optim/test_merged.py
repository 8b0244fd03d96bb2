"""The merged model of an own loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import noloco_jax as nj


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_merged_model_is_the_mean_of_the_replicas_in_their_dtype(dtype):
    """A sum in bfloat16 or float16 would stop growing."""
    x = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.5, (4096, 3)), dtype)
    merged = nj.merged({"w": x})["w"]
    assert merged.dtype == dtype
    np.testing.assert_allclose(merged, np.asarray(x, np.float64).mean(axis=0), rtol=2.0**-8)


def test_a_flax_model_with_dropout_merges_to_one_that_runs():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.dropout = nnx.Linear(3, 2, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.linear(x))

    model = nnx.vmap(lambda key: Model(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 4))
    kernels = np.asarray(model.linear.kernel[...], np.float64)
    one = nnx.merge(nnx.graphdef(model), nj.merged(nnx.state(model)))
    assert {0.0} < {*np.asarray(one(jnp.ones((50, 3)))).ravel()}  # some are dropped, others not
    one.eval()
    np.testing.assert_allclose(one(jnp.eye(3)), kernels.mean(axis=0), atol=1e-6)


def test_a_scalar_without_replicas_is_refused_by_name():
    with pytest.raises(ValueError, match=r"\['step'\] is a scalar"):
        nj.merged({"w": jnp.ones((2, 3)), "step": jnp.int32(3)})


def test_the_merged_model_of_sharded_replicas_is_their_mean():
    mesh = jax.make_mesh((4,), ("replica",), devices=jax.devices()[:4])
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P("replica")))
    np.testing.assert_array_equal(nj.merged(sharded), x.mean(axis=0))
