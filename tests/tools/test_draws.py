"""Draws, and keys of seeds."""

import jax
import numpy as np

from noloco_jax.optim import prng


def bits(seed: int) -> tuple[int, ...]:
    return tuple(np.asarray(jax.random.key_data(prng.key(seed))).tolist())


def test_each_purpose_has_draws_of_its_own():
    purposes = (prng.PAIRING, prng.POOL, prng.ROUTES, prng.CHECK)
    drawn = [prng.uint32s(0, purpose, np.arange(8)) for purpose in purposes]
    assert len(np.unique(drawn)) == 8 * len(purposes)


def test_every_bit_of_a_seed_counts():
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**33, 2**63, 2**64, 2**64 + 2**32, 10**30]
    assert len({bits(seed) for seed in seeds}) == len(seeds)


def test_a_seed_of_32_bits_has_jaxs_own_key():
    for seed in (0, 1, 2**31 - 1, 2**31, 2**32 - 1):
        assert bits(seed) == (0, seed) == tuple(np.asarray(jax.random.key_data(jax.random.key(seed))).tolist())
