"""Island in a bare JAX loop: a character model without a library, averaged with peers over the network.

    python -m noloco_jax.examples.island_jax --roster=roster.toml --name=paris --workdir=runs/paris
    python -m noloco_jax.examples.island_jax --roster=roster.toml --name=berlin --workdir=runs/berlin

The first waits for the second, two minutes at most. The next byte of Python's standard library is told from the eight
before it; each island draws from a half of its own. Where an island catches up from its peers, the random key is
theirs, and momentum begins anew.
"""

import argparse
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import noloco_jax as nj

CONTEXT, WIDTH, BATCH, RATE = 8, 128, 256, 0.15


def init(key: jax.Array) -> dict[str, jax.Array]:
    embed, hidden, head = jax.random.split(key, 3)
    return {
        "embed": 0.3 * jax.random.normal(embed, (256, 16)),
        "hidden": jax.random.normal(hidden, (16 * CONTEXT, WIDTH)) / np.sqrt(16 * CONTEXT),
        "head": jax.random.normal(head, (WIDTH, 256)) / np.sqrt(WIDTH),
    }


def loss(params: dict[str, jax.Array], rows: jax.Array) -> jax.Array:
    x = params["embed"][rows[:, :-1]].reshape(len(rows), -1)
    logits = jnp.tanh(x @ params["hidden"]) @ params["head"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), rows[:, -1:], axis=1))


@jax.jit
def train_step(params, rest, text):
    key, momentum = rest
    key, draw = jax.random.split(key)
    starts = jax.random.randint(draw, (BATCH, 1), 0, len(text) - CONTEXT)
    gradient = jax.grad(loss)(params, text[starts + jnp.arange(CONTEXT + 1)])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
    return jax.tree.map(lambda p, m: p - RATE * m, params, momentum), (key, momentum)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("roster", "name", "workdir"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--keys", help="folder of the island's keys; without, all islands are on this machine")
    parser.add_argument("--steps", type=int, default=2000)
    flags = parser.parse_args()
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)
    held_out, own = text[-10_000:], jnp.asarray(np.array_split(text[:-10_000], 2)[sum(map(ord, flags.name)) % 2])
    params = init(jax.random.key(0))  # the same on all islands
    rest = jax.random.key(sum(map(ord, flags.name))), jax.tree.map(jnp.zeros_like, params)
    outer = nj.noloco(sync_every=50, fragments=2, wire="int8")
    with nj.Island(flags.roster, flags.name, keys=flags.keys, workdir=flags.workdir, outer=outer) as island:
        params, rest, step = island.begin(params, rest)
        while step < flags.steps:
            params, rest = train_step(params, rest, own)
            params, rest, step = island.step(params, rest)
        merged = island.merge(params)
    rows = np.lib.stride_tricks.sliding_window_view(held_out, CONTEXT + 1)
    print(f"perplexity of the merged model per byte: {np.exp(loss(merged, jnp.asarray(rows))):.2f}")
