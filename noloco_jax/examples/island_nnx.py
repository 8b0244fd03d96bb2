"""Island in a Flax NNX and Optax loop: a classifier of two spirals, averaged with peers over the network.

    python -m noloco_jax.examples.island_nnx --roster=roster.toml --name=paris --workdir=runs/paris
    python -m noloco_jax.examples.island_nnx --roster=roster.toml --name=berlin --workdir=runs/berlin

The first island waits for the second for at most two minutes. Each island has its own data. When an island catches up
from a peer, Adam's state restarts.
"""

import argparse
import time

import jax
import numpy as np
import optax
from flax import nnx

import noloco_jax as nj
from noloco_jax.examples.mlp import mlp, spirals

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("roster", "name", "workdir"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--keys", help="folder of the island's keys; without, all islands are on this machine")
    parser.add_argument("--steps", type=int, default=600)
    flags = parser.parse_args()
    graph, params = nnx.split(mlp(32, seed=0), nnx.Param)  # the same on all islands
    tx = optax.adam(1e-2)

    @jax.jit
    def train_step(params, state, x, y):
        def loss(params):
            return optax.softmax_cross_entropy_with_integer_labels(nnx.merge(graph, params)(x), y).mean()

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state, rng = tx.init(params), np.random.default_rng([ord(letter) for letter in flags.name])
    outer = nj.noloco(sync_every=20, wire="modulo4")
    with nj.Island(flags.roster, flags.name, keys=flags.keys, workdir=flags.workdir, outer=outer) as island:
        params, state, step = island.begin(params, state, fresh=True)
        while step < flags.steps:
            params, state = train_step(params, state, *spirals(rng, 64))
            time.sleep(0.01)  # a step of a real model takes longer
            params, state, step = island.step(params, state)
        merged = island.merge(params)
    x, y = spirals(np.random.default_rng(0), 2000)
    print(f"accuracy of the merged model: {(nnx.merge(graph, merged)(x).argmax(-1) == y).mean():.3f}")
