"""NoLoCo in a plain Optax loop: four replicas of a Flax NNX classifier tell two spirals apart.

    python -m noloco_jax.examples.mlp                  # Adam inside each replica
    python -m noloco_jax.examples.mlp --inner=muon     # optax.contrib.muon: any inner optimizer works

All replicas are on one device, as the axis of a `vmap`; on several devices the same update runs in `jax.shard_map`.
Each replica has its own data. A linear classifier gets two thirds of it right.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax.contrib import muon

import noloco_jax as nj

REPLICAS, SYNC_EVERY, STEPS = 4, 20, 300
INNER = {"adam": lambda: optax.adam(1e-2), "muon": lambda: muon(2e-2)}


def mlp(width: int, seed: int) -> nnx.Module:
    sizes, rngs = [(2, width), (width, width), (width, 2)], nnx.Rngs(seed)
    first, *others = (nnx.Linear(*size, rngs=rngs) for size in sizes)
    return nnx.Sequential(first, *(layer for linear in others for layer in (nnx.relu, linear)))


def spirals(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw points (..., 2) on two arms of a turn and a half, a little off, and return them with their arms (...)."""
    arm = rng.integers(0, 2, shape)
    turn = np.sqrt(rng.uniform(0.02, 1, shape))
    angle = 3 * np.pi * turn + np.pi * arm
    points = turn[..., None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    return (2 * points + 0.1 * rng.normal(size=points.shape)).astype(np.float32), arm


def train(inner: str, steps: int = STEPS, width: int = 32, seed: int = 0):
    """Train; return the accuracy of each replica and of the merged model, and the replicas' spread after each step."""
    graph, params = nnx.split(mlp(width, seed), nnx.Param)
    pairing = nj.RandomPairing(REPLICAS, seed=seed)
    tx = optax.chain(INNER[inner](), nj.noloco(pairing, sync_every=SYNC_EVERY))  # noloco comes last

    def loss_fn(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(nnx.merge(graph, params)(x), y).mean()

    def train_step(params, state, x, y):
        updates, state = tx.update(jax.grad(loss_fn)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(jax.vmap(train_step, axis_name="replica"))  # the axis that noloco averages over
    params = jax.tree.map(lambda p: jnp.stack([p] * REPLICAS), params)  # all replicas start as one
    state = jax.vmap(tx.init)(params)
    rng = np.random.default_rng(seed)
    spreads = []
    for _ in range(steps):
        params, state = step(params, state, *spirals(rng, REPLICAS, 64))
        weights = np.concatenate([np.reshape(p, (REPLICAS, -1)) for p in jax.tree.leaves(params)], axis=1)
        spreads.append(float(np.sqrt(weights.var(axis=0).mean())))

    x, y = spirals(rng, 2000)
    accuracy = jax.jit(lambda params: (nnx.merge(graph, params)(x).argmax(-1) == y).mean())
    merged = accuracy(nj.merged(params))
    return np.asarray(jax.vmap(accuracy)(params)), float(merged), spreads


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inner", choices=INNER, default="adam")
    inner = parser.parse_args().inner
    print(f"{REPLICAS} replicas, {STEPS} steps of {inner}, each averaging with a random other every {SYNC_EVERY} steps")
    replicas, merged, spreads = train(inner)
    print("accuracy of each replica:", *(f"{a:.3f}" for a in replicas))
    print(f"accuracy of the merged model: {merged:.3f}")
    print(f"spread of the replicas before the last outer step {spreads[-2]:.2e}, after it {spreads[-1]:.2e}")
