"""Rates that a trainer's is compared with: the devices' matrix products, and the data pipeline alone.

Axes: D devices, K the side of square matrices.
"""

import contextlib
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from noloco_jax.config import TrainConfig
from noloco_jax.data import RunData, check_vocabulary, load_tokenizer

_PRODUCTS = 4  # one after another in a program, so that the time of its start hardly counts
_MATRIX_SECONDS = 1.0  # how long products are repeated
_UNTIMED_ROUNDS = 8  # batches of each replica that may have been prepared before the clock starts


def matrix_side(backend: str) -> int:
    """The side of the matrices of `matrix_rate`: large enough for the backend's full rate."""
    return 2048 if backend == "cpu" else 8192


def matrix_rate(devices: list, dtype: str) -> float:
    """FLOP/s that square matrix products of random numbers reach on all the devices at once: the best of a second.

    Args:
      devices: each multiplies matrices of its own.
      dtype: of the matrices; products have the precision that JAX gives them by default.
    """
    side = matrix_side(devices[0].platform)
    mesh = Mesh(np.asarray(devices), ("device",), axis_types=(AxisType.Auto,))
    sharded = NamedSharding(mesh, P("device"))

    @functools.partial(jax.jit, out_shardings=sharded)
    def random(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (len(devices), side, side), dtype) * jnp.asarray(side**-0.5, dtype)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("device"), out_specs=P("device"))
    def products(x_1KK: jax.Array) -> jax.Array:
        x_KK = x_1KK[0]
        for _ in range(_PRODUCTS):
            x_KK = x_KK @ x_1KK[0]
        return x_KK[None]

    x_DKK = random(jax.random.key(0))
    jax.block_until_ready(products(x_DKK))
    best, begun = float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - begun < _MATRIX_SECONDS:
        started = time.perf_counter()
        jax.block_until_ready(products(x_DKK))
        best = min(best, time.perf_counter() - started)
    return len(devices) * _PRODUCTS * 2 * side**3 / best


def data_rate(config: TrainConfig, seconds: float) -> float:
    """Tokens/s of the run's own data pipeline, all replicas' streams taken in turn with no training beside them.

    Raises:
      UserError: if the data or the tokenizer are not there.
    """
    data = RunData(config.data, seed=config.seed, vocab_size=config.model.vocab_size)
    tokenizer = None
    if data.needs_tokenizer:
        tokenizer = load_tokenizer(config.data.tokenizer)
        check_vocabulary(tokenizer, config.model.vocab_size)
    number = config.num_replicas
    with contextlib.closing(data.streams(tokenizer, {k: k for k in range(number)}, number)) as streams:

        def drain(most_rounds: float) -> tuple[int, float]:
            """Return the rounds taken from all streams, and the seconds that took."""
            rounds, started = 0, time.perf_counter()
            while rounds < most_rounds and (rounds == 0 or time.perf_counter() - started < seconds):
                next(streams)
                rounds += 1
            return rounds, time.perf_counter() - started

        drain(_UNTIMED_ROUNDS)
        rounds, took = drain(float("inf"))
    return rounds * config.num_replicas * config.data.batch_size * config.data.sequence_length / took
