"""Shuffles by enumeration."""

import numpy as np

from noloco_jax.data.shuffle import WindowShuffledShard, seeded_permutation


def test_a_permutation_holds_every_number_once():
    for count in (0, 1, 2, 1000):
        assert sorted(seeded_permutation(count, 3, 1).tolist()) == list(range(count))


def test_permutations_of_different_keys_differ():
    keys = [(0,), (1,), (0, 1), (1, 0), (1, 1), (0, 0, 1), (1, 0, 0)]
    assert len({tuple(seeded_permutation(50, *key)) for key in keys}) == 7


def test_the_permutation_of_a_key_never_changes():
    assert seeded_permutation(8, 0, 1).tolist() == [5, 4, 0, 7, 2, 3, 6, 1]


class Numbers(WindowShuffledShard):
    """The documents 0 to 24."""

    seek_hint: tuple[int, ...] = ()

    def read_window(self, window):
        return list(range(25))[window * self._window_size : (window + 1) * self._window_size]

    def close(self):
        pass


def test_a_shard_is_shuffled_within_each_window():
    shard = Numbers(10, (1, 2))
    found: list = [shard.get(document) for document in range(25)]
    for start in (0, 10, 20):
        window = found[start : start + 10]
        assert sorted(window) == list(range(25))[start : start + 10] != window
    assert [document + 10 for document in found[:10]] != found[10:20]  # each in an order of its own
    assert shard.get(25) is None
    assert shard.get(40) is None


def test_a_window_of_one_keeps_the_order():
    shard = Numbers(1, (1, 2))
    assert [shard.get(document) for document in range(25)] == list(range(25))


def test_every_bit_of_a_seed_counts_and_small_seeds_are_as_they_were():
    keys = [(0, 1), (2**32, 0), (2**32,), (0, 1, 0), (1, 0), (2**32 + 1, 0), (2**64, 0), (0, 2**32), (2**63 - 1, 0)]
    assert len({tuple(seeded_permutation(50, *key)) for key in keys}) == len(keys)
    largest = np.random.PCG64(np.random.SeedSequence((2, 2**32 - 1, 7)))  # as it has always been
    assert seeded_permutation(50, 2**32 - 1, 7).tolist() == np.argsort(largest.random_raw(50), kind="stable").tolist()
