"""Random numbers that are the same everywhere: a fixed integer hash, in numpy on the host and in JAX inside programs.

JAX's own draws depend on `jax_default_prng_impl`, on its version and, under `rbg`, on `vmap`. Who meets whom must not:
the log of a run, its processes and its compiled programs each compute the draws by themselves.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Keeps the draws of different purposes apart.
PAIRING, POOL, ROUTES, CHECK = range(4)


def uint32s(seed: int, purpose: int, *indices: Any) -> Any:
    """Uniform 32-bit integers, one for every combination of the broadcast `indices`.

    Words are mixed in one by one by the finalizer of MurmurHash3, a bijection of 32 bits in which every bit of the
    input changes every bit of the output with a probability near one half.

    Args:
      seed: any non-negative integer; all of its bits count.
      purpose: one of the constants above.
      *indices: non-negative integers below 2**32 or arrays of them; with a JAX array among them the result is one.

    Returns:
      uint32, numpy's or JAX's.
    """
    xp = jnp if any(isinstance(index, jax.Array) for index in indices) else np
    words: list[Any] = [np.uint32(word) for word in (len(indices), purpose, seed & 0xFFFFFFFF)]
    while seed := seed >> 32:
        words.append(np.uint32(seed & 0xFFFFFFFF))
    state: Any = np.uint32(0)
    with np.errstate(over="ignore"):  # numpy warns where scalars wrap around
        for word in (*words, *(xp.asarray(index).astype(np.uint32) for index in indices)):
            x = (state ^ word) + np.uint32(0x9E3779B9)
            x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
            x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
            state = x ^ (x >> np.uint32(16))
    return state


def key(seed: int) -> jax.Array:
    """JAX's key of a seed, any non-negative integer; all of its bits count, where JAX's own takes the lowest 32."""
    key = jax.random.key(seed & 0xFFFFFFFF)
    while seed := seed >> 32:
        key = jax.random.fold_in(key, np.uint32(seed & 0xFFFFFFFF))
    return key


def permutation(count: int, seed: int, purpose: int, *key: Any) -> Any:
    """A random order of 0 to `count` - 1, int32 (count,), a function of seed, purpose and the scalars of `key`."""
    return uint32s(seed, purpose, *key, np.arange(count)).argsort(stable=True).astype(np.int32)


def below(bound: int, seed: int, purpose: int, *indices: Any) -> Any:
    """Uniform integers from 0 to `bound` - 1, int32, one for every combination of the broadcast `indices`."""
    return (uint32s(seed, purpose, *indices) % np.uint32(bound)).astype(np.int32)
