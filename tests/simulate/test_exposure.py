"""Fragments, wires and delays on given links, against hand counts and an event-by-event replay of a run."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from noloco_jax.simulate.cost import (
    Setting,
    all_reduce,
    cost_of,
    exposed_seconds,
    exposed_share,
    fitting,
    group_exchange,
    shortest_interval,
    smallest_delay,
)

# 4 GB of float32 at 1 GB/s.
SETTING = Setting(params=1e9, bandwidth=8e9, latency=0.1, step_time=0.5, replicas=8, sync_every=10, steps=37)


def replayed(seconds: float, step_time: float, sync_every: int, fragments: int, delay: int) -> float:
    """Return the mean seconds that a step waits for the link, replaying compute, link and corrections by events."""
    rounds = 40
    numbers = itertools.count(1)
    due = next(numbers)  # the k-th outer step follows inner step ⌈k H / F⌉
    clock = link_free = waited = waited_at_half = 0.0
    in_flight: list[tuple[int, float]] = []  # (inner step that applies it, its arrival)
    for step in range(1, rounds * sync_every + 1):
        clock += step_time
        while in_flight and in_flight[0][0] <= step:
            wait = max(in_flight.pop(0)[1] - clock, 0)
            clock, waited = clock + wait, waited + wait
        while math.ceil(due * sync_every / fragments) == step:
            due = next(numbers)
            link_free = max(clock, link_free) + seconds
            if delay:
                in_flight.append((step + delay, link_free))
            else:
                clock, waited = link_free, waited + seconds
        if step == rounds * sync_every // 2:
            waited_at_half = waited
    return (waited - waited_at_half) / (rounds * sync_every / 2)


def predicted(seconds: float, step_time: float, sync_every: int, fragments: int, delay: int) -> float:
    every = sync_every / fragments
    return exposed_seconds(seconds, every, delay, step_time) / every


@pytest.mark.parametrize(("sync_every", "fragments"), [(12, 1), (12, 4), (12, 12), (2, 8), (1, 1), (1, 3)])
@pytest.mark.parametrize("seconds", [0.2, 0.7, 1.9, 5.0, 40.0])
def test_exposed_time_of_evenly_spaced_exchanges_equals_the_replayed_wait(sync_every, fragments, seconds):
    for delay in range(sync_every + 1):
        args = (seconds, 0.6, sync_every, fragments, delay)
        np.testing.assert_allclose(predicted(*args), replayed(*args), rtol=1e-9, atol=1e-9, err_msg=f"delay {delay}")


@pytest.mark.parametrize(("sync_every", "fragments"), [(10, 4), (29, 10), (7, 3), (2, 3)])
def test_exposed_time_of_unevenly_spaced_exchanges_is_near_the_replayed_wait(sync_every, fragments):
    step_time = 0.6
    for seconds, delay in itertools.product(np.linspace(0.1, 3, 8), range(sync_every + 1)):
        args = (float(seconds), step_time, sync_every, fragments, delay)
        more = (replayed(*args) - predicted(*args)) * sync_every / fragments  # of one exchange
        assert abs(more) < step_time / 10, args


@pytest.mark.parametrize(
    ("fragments", "wire", "megabytes"),
    [
        (1, "float32", 4000.0),
        (4, "float32", 1000.0),
        (4, "int8", 257.8125),  # 66 bytes for 64 weights
        (4, "int6", 195.3125),  # 50
        (8, "modulo4", 66.40625),  # 34
    ],
)
def test_costs_of_a_pair_follow_from_its_fragments_and_wire(fragments, wire, megabytes):
    cost = cost_of(replace(SETTING, fragments=fragments, wire=wire), "NoLoCo")
    assert cost.bytes_per_sync == megabytes * 1e6
    assert cost.bytes_per_step == pytest.approx(megabytes * 1e6 * fragments / 10)
    assert cost.bytes_in_all == megabytes * 1e6 * (37 * fragments // 10)  # 37 inner steps
    latencies = 2 if wire == "modulo4" else 1  # windows go ahead
    assert cost.seconds_per_sync == pytest.approx(0.1 * latencies + megabytes / 1000)


def test_diloco_all_reduces_fragments_as_float32_for_a_quantizing_wire():
    setting = replace(SETTING, fragments=4, wire="int6")
    assert all_reduce(setting, fragments=4) == pytest.approx((1.75e9, 6 * 0.1 + 1.75))
    assert cost_of(setting, "DiLoCo").bytes_per_sync == 1.75e9
    assert cost_of(setting, "DDP").bytes_per_sync == 7e9  # whole, every step
    assert cost_of(setting, "DDP").bytes_in_all == 37 * 7e9
    assert group_exchange(replace(setting, wire="bfloat16"), fragments=4)[0] == 5e8


def test_exposed_seconds_match_counts_by_hand():
    def exposed(method: str, **changes) -> float:
        return cost_of(replace(SETTING, **changes), method).exposed_per_step

    assert exposed("NoLoCo") == pytest.approx(4.1 / 10)
    assert exposed("NoLoCo", delay=4) == pytest.approx((4.1 - 2) / 10)
    assert exposed("NoLoCo", delay=9) == 0  # 4.5 s
    assert exposed("NoLoCo", delay=1, bandwidth=160e9, step_time=0.3) == 0  # though 0.1 + 0.2 > 0.3
    # An exchange of 1.1 s every 2.5 steps: a delay of 2 hides 1 s of it, a delay of 3 all.
    assert exposed("NoLoCo", delay=2, fragments=4) == pytest.approx(0.1 / 2.5)
    assert exposed("NoLoCo", delay=3, fragments=4) == 0
    # DiLoCo's 2.35 s exceed the 1.25 s between two exchanges at any delay; DDP does not delay its 7.6 s.
    assert exposed("DiLoCo", delay=10, fragments=4) == pytest.approx((2.35 - 1.25) / 2.5)
    assert exposed("DDP", delay=10, fragments=4) == pytest.approx(7.6)


@pytest.mark.parametrize(
    "changes", [{}, {"latency": 0.8}, {"latency": 2.0}, {"fragments": 5}, {"fragments": 5, "wire": "int4"}]
)
@pytest.mark.parametrize("method", ["NoLoCo", "DiLoCo"])
def test_the_smallest_delay_is_the_first_without_a_replayed_wait(method, changes):
    setting = replace(SETTING, **changes)
    seconds = cost_of(setting, method).seconds_per_sync
    hiding = [d for d in range(11) if replayed(seconds, 0.5, 10, setting.fragments, d) < 1e-9]
    assert smallest_delay(setting, method) == min(hiding, default=None)


@pytest.mark.parametrize("changes", [{}, {"fragments": 8}, {"wire": "int6"}, {"latency": 2.0}])
def test_the_shortest_interval_is_the_first_without_a_replayed_wait_at_some_delay(changes):
    setting = replace(SETTING, **changes)
    seconds = cost_of(setting, "NoLoCo").seconds_per_sync

    def hides(sync_every: int) -> bool:
        return any(replayed(seconds, 0.5, sync_every, setting.fragments, d) < 1e-9 for d in range(sync_every + 1))

    assert shortest_interval(setting) == next(filter(hides, itertools.count(1)))


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        # An exchange takes 4.1 s, a step 0.5 s.
        ({}, ("float32", 10, 9)),
        ({"delay": 3}, ("float32", 10, 9)),
        # 4 steps, 2 s, cannot hide bfloat16 (2.1 s), but int8 (0.1 s + 66 bytes for 64 weights).
        ({"sync_every": 4}, ("int8", 4, 3)),
        ({"sync_every": 4, "wire": "int4"}, ("int4", 4, 2)),
        # No wire beats the latency: modulo4 takes 2 · 0.8 s + 0.53 s, a step 0.5 s.
        ({"sync_every": 1, "latency": 0.8}, ("modulo4", 5, 5)),
        ({"sync_every": 1, "latency": 0.8, "group_size": 4}, ("int4", 8, 8)),
    ],
)
def test_fitting_changes_as_little_as_needed_and_takes_the_smallest_delay(changes, fits):
    found = fitting(replace(SETTING, **changes))
    assert (found.wire, found.sync_every, found.delay) == fits
    assert exposed_share(found) == 0
    assert exposed_share(replace(found, delay=found.delay - 1)) > 0
