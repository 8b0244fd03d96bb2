"""Which replica's next stage a micro-batch enters (arXiv 2506.10911, Section 3: random pipeline routing)."""

import jax
import numpy as np

from noloco_jax.draws import ROUTES, below

# Fewer replicas than this get several Latin squares, for more variety.
_LEAST_ROUTES = 8
# Each is a branch of the compiled program.
_MOST_ROUTES = 64


def route_pool(num_replicas: int, num_stages: int, seed: int, routing: str) -> np.ndarray:
    """The routes that are compiled: int32 (pool, S - 1, N), entry [p, s, i] is where replica i's stage s sends.

    Random: the rows of Latin squares with shuffled rows, columns and symbols, other ones at every boundary, so that a
    uniform draw makes every replica of the next stage exactly equally likely. Of more than 64 replicas, 64 rows: each
    replica then sends to 64 of the others, equally often. Fixed: everyone to itself.
    """
    if routing == "fixed" or num_replicas == 1:
        return np.tile(np.arange(num_replicas, dtype=np.int32), (1, num_stages - 1, 1))
    rng = np.random.default_rng([seed, num_replicas, num_stages])
    pool = []
    for _ in range(-(-_LEAST_ROUTES // num_replicas)):
        squares = []
        for _ in range(num_stages - 1):
            rows, columns, symbols = (rng.permutation(num_replicas) for _ in range(3))
            squares.append(symbols[(rows[:_MOST_ROUTES, None] + columns[None, :]) % num_replicas])
        pool.append(np.stack(squares, axis=1))
    return np.concatenate(pool).astype(np.int32)


def draw_routes(pool_size: int, num_ticks: int, seed: int, step: jax.Array) -> jax.Array:
    """The pool entry of every tick of inner step `step`: int32 (ticks,), uniform, a function of seed and step.

    Micro-batch m crosses boundary s at tick m + s, along `pool[entry[m + s], s]`: every micro-batch and boundary has a
    draw of its own.
    """
    return below(pool_size, seed, ROUTES, step, np.arange(num_ticks))
