"""Warnings about replicas whose weights move much farther than usual."""

import math

from noloco_jax.run.proportion import Proportion


def test_a_replica_that_moves_far_more_than_the_others_is_named():
    (line,) = Proportion().unusual({0: 1.0, 1: 1.2, 2: 40.0, 3: 0.9})
    assert line.startswith("replica 2 moved 36 times as far as usual")


def test_replicas_that_move_too_far_at_the_same_time_share_a_line():
    proportion = Proportion()
    assert not proportion.unusual(dict.fromkeys(range(4), 1.0))
    (line,) = proportion.unusual({0: 20.0, 1: 1.0, 2: 30.0, 3: 40.0})
    assert line.startswith("replicas 0, 2 and 3 moved 40 times as far as usual")
    (line,) = proportion.unusual(dict.fromkeys(range(4), 25.0))
    assert line.startswith("replicas 0 to 3 moved 25 times as far as usual")
    one, other = proportion.unusual({0: math.nan, 1: 1.0, 2: math.inf, 3: 40.0})
    assert one.startswith("replicas 0 and 2 moved to weights that are not finite")
    assert other.startswith("replica 3 moved 40 times as far as usual")


def test_a_replica_alone_in_its_process_is_compared_with_its_own_past():
    proportion = Proportion()
    assert not any(proportion.unusual({5: 1.0}) for _ in range(6))
    (line,) = proportion.unusual({5: 11.0})
    assert line.startswith("replica 5 moved 11 times as far as usual")
    assert not proportion.unusual({5: 1.5})  # the outlier does not count towards the usual movement


def test_a_non_finite_movement_is_reported():
    proportion = Proportion()
    assert not any(proportion.unusual({5: 1.0}) for _ in range(6))
    assert proportion.unusual({5: math.nan}) and proportion.unusual({5: math.inf})


def test_learning_rate_warmup_and_decay_do_not_warn():
    proportion = Proportion()
    rates = [k / 20 for k in range(1, 21)] + [0.5 * (1 + math.cos(math.pi * k / 200)) + 0.02 for k in range(200)]
    assert not any(proportion.unusual({0: rate, 1: 1.1 * rate}) for rate in rates)
