"""The learning rates of a run, against those that torch's schedulers gave the authors' code."""

import numpy as np

from noloco_jax.config import InnerConfig, TrainConfig
from noloco_jax.spmd.inner import learning_rates
from support.paths import GOLDEN


def test_the_learning_rate_of_every_step_is_the_golden_one():
    config = TrainConfig(num_steps=200, inner=InnerConfig(lr=6e-4, min_lr=6e-5, warmup_steps=20))
    with np.load(GOLDEN / "outer" / "lr.npz") as golden:
        np.testing.assert_allclose(learning_rates(config), golden["cosine"][:200], rtol=1e-6)
