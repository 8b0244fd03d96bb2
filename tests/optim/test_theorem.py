"""The paper's theorem on a quadratic loss, by our transform.

The loss is ½ (θ − c)ᵀ A (θ − c) in the eigenbasis of A. Every SGD step of every replica draws a fresh c ~ N(0, I).
"""

import jax
import numpy as np

import noloco_jax as nj

CURVATURES = np.array([0.5, 1.0, 2.0])
ALPHA, BETA, INNER_STEPS, REPLICAS = 0.5, 0.7, 6, 32


def quadratic_runs(inner_lr: float, num_rounds: int, seed: int) -> np.ndarray:
    """Return the slow weights (outer step, replica, direction) of replicas that start at the optimum."""
    pairing = nj.RandomPairing(REPLICAS, seed=seed)
    outer = nj.noloco(pairing, BETA, ALPHA, sync_every=1, axis_name="replica")

    def one_round(carry, key):
        (params, state), size = carry, CURVATURES.size

        def inner(theta, key):
            return theta - inner_lr * CURVATURES * (theta - jax.random.normal(key, (size,))), None

        keys = jax.random.split(jax.random.fold_in(key, jax.lax.axis_index("replica")), INNER_STEPS)
        params, state = outer.step(jax.lax.scan(inner, params, keys)[0], state)
        return (params, state), params

    @jax.jit
    def run(keys):
        def replica(params):
            return jax.lax.scan(one_round, (params, outer.init(params)), keys)[1]

        return jax.vmap(replica, axis_name="replica", out_axes=1)(np.zeros((REPLICAS, CURVATURES.size), "f4"))

    return np.asarray(run(jax.random.split(jax.random.key(seed), num_rounds)))


def test_the_variance_over_replicas_is_the_square_of_the_inner_learning_rate():
    rates = np.geomspace(1e-5, 1e-3, 3)
    variances = [quadratic_runs(rate, 120, seed=3)[40:].var(axis=1, ddof=1).sum(-1).mean() for rate in rates]
    slope = np.polyfit(np.log(rates), np.log(variances), 1)[0]
    assert abs(slope - 2) < 0.02  # 1.99 at these rates, 2 in the limit
