"""Random pipeline routing (arXiv 2506.10911, Section 3): the replica whose next stage a micro-batch enters."""

from typing import Any

import numpy as np

from noloco_jax.optim.prng import ROUTES, below, permutation

# Fewer replicas than this get several Latin squares, for more variety.
_LEAST_ROUTES = 8
# Each is a branch of the compiled program.
_MOST_ROUTES = 64


def route_pool(num_replicas: int, num_stages: int, seed: int, routing: str) -> np.ndarray:
    """Return the routes to compile, int32 (pool, S - 1, N): replica i's stage s sends to replica [p, s, i].

    Random routing uses the rows of Latin squares with shuffled rows, columns and symbols, different at every boundary,
    so that a uniform draw makes every replica of the next stage equally likely. More than 64 replicas use 64 rows: each
    replica then sends to 64 of the others, equally often. With fixed routing every replica sends to itself.
    """
    if routing == "fixed" or num_replicas == 1:
        return np.tile(np.arange(num_replicas, dtype=np.int32), (1, num_stages - 1, 1))
    pool = []
    for block in range(-(-_LEAST_ROUTES // num_replicas)):
        squares = []
        for boundary in range(num_stages - 1):
            rows, columns, symbols = (permutation(num_replicas, seed, ROUTES, block, boundary, i) for i in range(3))
            squares.append(symbols[(rows[:_MOST_ROUTES, None] + columns[None, :]) % num_replicas])
        pool.append(np.stack(squares, axis=1))
    return np.concatenate(pool).astype(np.int32)


def num_ticks(num_microbatches: int, num_stages: int) -> int:
    """Return the ticks of an inner step."""
    return num_microbatches + num_stages - 1


def draw_routes(pool_size: int, num_ticks: int, seed: int, step: Any) -> Any:
    """Draw the pool entry of every tick of inner step `step`: int32 (ticks,), uniform, a function of seed and step.

    Micro-batch m crosses boundary s at tick m + s, along `pool[entry[m + s], s]`: every micro-batch and boundary has a
    draw of its own.
    """
    return below(pool_size, seed, ROUTES, step, np.arange(num_ticks))
