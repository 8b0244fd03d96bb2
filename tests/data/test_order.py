"""Shuffles and hold-outs by enumeration."""

import numpy as np
import pytest

from noloco_jax.data.order import Selection, WindowLane, shuffled


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_a_shuffle_is_a_permutation(count):
    assert sorted(shuffled(count, 3, 1).tolist()) == list(range(count))


def test_shuffles_of_different_keys_differ():
    orders = {tuple(shuffled(50, *key)) for key in [(0,), (1,), (0, 1), (1, 0), (1, 1), (0, 0, 1), (1, 0, 0)]}
    assert len(orders) == 7


def test_the_shuffle_of_a_key_never_changes():
    assert shuffled(8, 0, 1).tolist() == [5, 4, 0, 7, 2, 3, 6, 1]


@pytest.mark.parametrize("count", [1, 2, 7, 49, 50, 51, 76, 1003])
def test_every_item_is_either_held_out_or_in_the_rest(count):
    held_out, rest = (Selection(count, split).mask(0, count) for split in ("held_out", "rest"))
    np.testing.assert_array_equal(held_out, ~rest)
    assert 1 <= held_out.sum() <= max(1, round(count / 49))


@pytest.mark.parametrize("split", ["all", "held_out", "rest"])
@pytest.mark.parametrize("count", [1, 2, 49, 50, 127])
def test_counts_before_an_item_are_those_of_the_mask(split, count):
    selection = Selection(count, split)
    mask = selection.mask(0, count)
    assert [selection.before(k) for k in range(count + 1)] == [int(mask[:k].sum()) for k in range(count + 1)]
    np.testing.assert_array_equal(selection.mask(count // 3, count), mask[count // 3 :])


class Numbers(WindowLane):
    """The documents 0..24."""

    anchor: tuple[int, ...] = ()

    def read_window(self, window):
        return list(range(25))[window * self._size : (window + 1) * self._size]

    def close(self):
        pass


def test_a_window_lane_shuffles_within_each_window():
    lane = Numbers(10, (1, 2))
    found: list = [lane.get(position) for position in range(25)]
    for start in (0, 10, 20):
        window = found[start : start + 10]
        assert sorted(window) == list(range(25))[start : start + 10] != window
    assert lane.get(25) is None
    assert lane.get(40) is None


def test_a_window_of_one_keeps_the_order():
    lane = Numbers(1, (1, 2))
    assert [lane.get(position) for position in range(25)] == list(range(25))
