"""The paper's theorem on a quadratic loss, by our transform.

The loss is ½ (θ − c)ᵀ A (θ − c) in the eigenbasis of A. Every SGD step of every replica draws a fresh c ~ N(0, I).
"""

import jax
import numpy as np

import noloco_jax as nj

CURVATURES = np.array([0.5, 1.0, 2.0])
ALPHA, BETA, INNER_STEPS, REPLICAS = 0.5, 0.7, 6, 32


def quadratic_runs(inner_lr: float, start: float, num_rounds: int, seed: int) -> np.ndarray:
    """Return the slow weights (outer step, replica, direction) of replicas that start at `start`."""
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

        return jax.vmap(replica, axis_name="replica", out_axes=1)(np.full((REPLICAS, CURVATURES.size), start, "f4"))

    return np.asarray(run(jax.random.split(jax.random.key(seed), num_rounds)))


def test_the_mean_of_the_slow_weights_follows_a_heavy_ball_to_the_optimum():
    inner_lr, num_rounds = 0.03, 60
    pull = BETA * (1 - (1 - inner_lr * CURVATURES) ** INNER_STEPS)
    phi, delta, expected = np.ones(3), np.zeros(3), []
    for _ in range(num_rounds):
        delta = ALPHA * delta - pull * phi
        phi = phi + delta
        expected.append(phi)
    means = np.stack([quadratic_runs(inner_lr, 1.0, num_rounds, seed).mean(axis=1) for seed in range(12)])
    error = means.std(axis=0, ddof=1) / np.sqrt(len(means))
    assert np.abs(expected[-1]).max() < 0.03
    # 180 deviations; a t of 11 degrees of freedom exceeds 8 once in 100,000.
    assert np.abs((means.mean(axis=0) - expected) / error).max() < 8


def test_the_variance_over_replicas_is_the_square_of_the_inner_learning_rate():
    rates = np.geomspace(1e-5, 1e-3, 3)
    variances = [quadratic_runs(rate, 0.0, 120, seed=3)[40:].var(axis=1, ddof=1).sum(-1).mean() for rate in rates]
    slope = np.polyfit(np.log(rates), np.log(variances), 1)[0]
    assert abs(slope - 2) < 0.02  # 1.99 at these rates, 2 in the limit
