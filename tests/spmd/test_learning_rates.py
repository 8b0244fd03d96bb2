"""Learning rates of a run, against those of torch's schedulers in the authors' code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noloco_jax.config import InnerConfig, TrainConfig, from_dict
from noloco_jax.spmd.inner import at_step, inner_optimizer, learning_rates
from support.paths import GOLDEN


def test_learning_rates_match_the_golden_ones():
    config = TrainConfig(num_steps=200, inner=InnerConfig(lr=6e-4, min_lr=6e-5, warmup_steps=20))
    with np.load(GOLDEN / "outer" / "lr.npz") as golden:
        np.testing.assert_allclose(learning_rates(config.inner, config.num_steps), golden["cosine"][:200], rtol=1e-6)


def rates(schedule: str, num_steps: int) -> np.ndarray:
    return learning_rates(InnerConfig(lr=1.0, min_lr=0.1, warmup_steps=4, schedule=schedule), num_steps)


def test_a_constant_schedule_stays_where_the_warmup_ends():
    np.testing.assert_allclose(rates("constant", 10), [0.25, 0.5, 0.75, *[1.0] * 7], rtol=1e-6)


def test_warmup_stable_decay_is_level_and_falls_linearly_at_the_end():
    expected = [0.25, 0.5, 0.75, *[1.0] * 13, *np.linspace(1.0, 0.1, 5)[:4]]
    np.testing.assert_allclose(rates("wsd", 20), expected, rtol=1e-6)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "muon"])
def test_at_step_sets_the_optimizers_position_in_the_schedule(optimizer):
    """Past the end of a schedule that decays to 0, no parameter moves, however few steps were taken."""
    config = from_dict(
        {"num_steps": 20, "inner": {"optimizer": optimizer, "lr": 1e-2, "warmup_steps": 2, "min_lr": 0.0}}
    )
    params = {"embed": jnp.ones((4, 4)), "blocks": {"up": jnp.ones((1, 4, 4))}}
    gradient = jax.tree.map(lambda x: jnp.arange(1.0, 1.0 + x.size).reshape(x.shape), params)
    inner = inner_optimizer(config.model, config.inner, config.num_steps)
    state = inner.init(params)
    moved = jax.tree.leaves(inner.update(gradient, state, params)[0])
    assert all(np.abs(x).max() > 1e-5 for x in moved)
    updates, after = inner.update(gradient, at_step(state, 21), params)
    assert not any(np.any(x) for x in jax.tree.leaves(updates))
    rest = jax.tree.leaves(inner.update(gradient, after, params)[0])
    assert not any(np.any(x) for x in rest)
