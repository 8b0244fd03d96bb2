"""Hold-outs by enumeration."""

import numpy as np

from noloco_jax.data.splits import HoldOut


def test_every_item_is_either_held_out_or_in_the_rest():
    for count in (1, 2, 7, 49, 50, 51, 76, 1003):
        held_out, rest = (HoldOut(count, split).mask(0, count) for split in ("held_out", "rest"))
        np.testing.assert_array_equal(held_out, ~rest)
        assert 1 <= held_out.sum() <= max(1, round(count / 49)), count


def test_counts_before_an_item_are_those_of_the_mask():
    for split in ("all", "held_out", "rest"):
        for count in (1, 2, 49, 50, 127):
            hold_out = HoldOut(count, split)
            mask = hold_out.mask(0, count)
            counts = [hold_out.count_before(k) for k in range(count + 1)]
            assert counts == [int(mask[:k].sum()) for k in range(count + 1)], (split, count)
            np.testing.assert_array_equal(hold_out.mask(count // 3, count), mask[count // 3 :])
