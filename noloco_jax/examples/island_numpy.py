"""Island in a NumPy loop: logistic regression by hand, averaged with peers over the network.

    python -m noloco_jax.examples.island_numpy --roster=roster.toml --name=paris --workdir=runs/paris
    python -m noloco_jax.examples.island_numpy --roster=roster.toml --name=berlin --workdir=runs/berlin

The first island waits for the second for at most two minutes. Each island has its own data. When an island catches up
from a peer, `momentum` restarts.
"""

import argparse
import time

import numpy as np

import noloco_jax as nj

FEATURES, RATE, MOMENTUM = 16, 0.1, 0.9


def points(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw points (count, FEATURES) and their labels, by a plane that is the same on all islands."""
    plane = np.random.default_rng(0).normal(size=FEATURES)
    x = rng.normal(size=(count, FEATURES)).astype(np.float32)
    return x, (x @ plane + 0.3 * rng.normal(size=count) > 0).astype(np.float32)


def train_step(params: dict, momentum: dict, x: np.ndarray, y: np.ndarray) -> tuple[dict, dict]:
    error = 1 / (1 + np.exp(-(x @ params["w"] + params["b"]))) - y
    gradient = {"w": x.T @ error / len(y), "b": error.mean(keepdims=True)}
    momentum = {name: MOMENTUM * momentum[name] + gradient[name] for name in params}
    return {name: params[name] - np.float32(RATE) * momentum[name] for name in params}, momentum


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("roster", "name", "workdir"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--keys", help="folder of the island's keys; without, all islands are on this machine")
    parser.add_argument("--steps", type=int, default=200)
    flags = parser.parse_args()
    rng = np.random.default_rng([ord(letter) for letter in flags.name])
    params = {"w": np.zeros(FEATURES, np.float32), "b": np.zeros(1, np.float32)}
    momentum = {name: np.zeros_like(x) for name, x in params.items()}
    outer = nj.noloco(sync_every=10)
    with nj.Island(flags.roster, flags.name, keys=flags.keys, workdir=flags.workdir, outer=outer) as island:
        params, momentum, step = island.begin(params, momentum, fresh=True)
        while step < flags.steps:
            params, momentum = train_step(params, momentum, *points(rng, 64))
            time.sleep(0.02)  # a step of a real model takes longer
            params, momentum, step = island.step(params, momentum)
        params = island.merge(params)
    x, y = points(np.random.default_rng(1), 5000)
    print(f"accuracy of the merged model: {((x @ params['w'] + params['b'] > 0) == y).mean():.3f}")
