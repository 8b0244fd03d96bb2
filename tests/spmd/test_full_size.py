"""Programs of the paper's configurations at full size, by their shapes: nothing is compiled or allocated."""

import jax
import jax.numpy as jnp
import pytest

from noloco_jax.config import from_dict, load_config
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import build_programs
from support.paths import CONFIGS


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@pytest.mark.parametrize(("size", "num_devices"), [("125m", 8), ("1b", 1), ("7b", 8)])
def test_every_program_accepts_a_state_beyond_32_bit_sizes(size, num_devices):
    config = from_dict(load_config(str(CONFIGS / f"c4_{size}.py"), []))
    programs = build_programs(config, make_mesh(config, jax.devices()[:num_devices]))
    params, inner, outer = programs.state
    assert sum(x.size for x in jax.tree.leaves(params)) > 2**30
    step = jax.ShapeDtypeStruct((), jnp.int32)
    assert programs.outer_step is not None

    assert shapes(jax.eval_shape(programs.init, jax.eval_shape(jax.random.key, 0))) == shapes(programs.state)
    trained = jax.eval_shape(programs.inner_step, params, inner, programs.batch, step)
    assert shapes(trained[:2]) == shapes((params, inner))
    assert shapes(jax.eval_shape(programs.outer_step, params, outer)) == shapes((params, outer))
    assert shapes(jax.eval_shape(programs.merge, params)) == shapes(params)
    assert jax.eval_shape(programs.spread, params).shape == ()
    loss, number = jax.eval_shape(programs.evaluate, params, programs.batch)
    assert loss.shape == number.shape == (config.num_replicas,)
