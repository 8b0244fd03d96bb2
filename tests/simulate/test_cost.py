"""The cost model: bytes against the trainer's programs, times against hand counts and a replay of a run by events."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from noloco_jax.config import from_dict
from noloco_jax.model.architecture import num_params
from noloco_jax.tools.cost import (
    Setting,
    all_exchange,
    collectives,
    cost_of,
    exposed_seconds,
    fitting,
    group_exchange,
    latencies_of,
    shortest_interval,
    smallest_delay,
    tree_over_pair,
)
from noloco_jax.train.bytes_sent import bytes_sent_of

MODEL = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
# 4 GB of float32 at 1 GB/s.
SETTING = Setting(params=1e9, bandwidth=8e9, latency=0.1, step_time=0.5, replicas=8, sync_every=10, steps=37)


def sent(method: str, num_replicas: int, **outer) -> tuple[int, float]:
    """Return (parameters, bytes that a replica sends in an outer step)."""
    config = from_dict({"method": method, "num_replicas": num_replicas, "model": MODEL, "outer": outer})
    messages = bytes_sent_of(config, {"replica": 1, "stage": 1, "fsdp": 1, "tensor": 1})
    return num_params(config.model)[0], messages.outer_step


@pytest.mark.parametrize(
    ("group", "wire"),
    [*(((n, size), "float32") for n, size in ((4, 2), (5, 2), (8, 8), (6, 3), (7, 4))), ((5, 3), "bfloat16")],
)
def test_bytes_of_a_group_exchange_equal_those_of_the_outer_program(group, wire):
    num_replicas, n = group
    params, expected = sent("noloco", num_replicas, group_size=n, wire=wire)
    setting = Setting(params=params, replicas=num_replicas, group_size=n, wire=wire)
    assert group_exchange(setting)[0] == pytest.approx(expected, rel=1e-3)  # shards are whole numbers of weights


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_bytes_of_an_exchange_of_all_equal_those_of_dilocos_outer_program(wire):
    params, expected = sent("diloco", 4, wire=wire)
    setting = Setting(params=params, replicas=4, wire=wire)
    assert all_exchange(setting)[0] == pytest.approx(expected, rel=1e-3)  # parts are whole numbers of weights


def test_bytes_and_seconds_of_exchanges_match_counts_by_hand():
    # A step of a collective takes 0.2 s beside its bytes; a pair's sum has two.
    assert group_exchange(SETTING) == pytest.approx((4e9, 2 * 0.2 + 4))
    # 258 MB of 66 bytes for 64 weights in each of 4 fragments.
    assert group_exchange(replace(SETTING, wire="int8"), 4) == pytest.approx((257.8125e6, 2 * 0.2 + 0.2578125))
    # 10 MB: one step with both directions in turn.
    assert group_exchange(replace(SETTING, params=2.5e6)) == pytest.approx((10e6, 0.2 + 2 * 0.01))
    # Windows go ahead of 34 bytes for 64 weights.
    assert group_exchange(replace(SETTING, wire="modulo4")) == pytest.approx((531.25e6, 3 * 0.2 + 0.53125))
    # Groups of four swap halves three times, with the windows of a whole and of a half ahead.
    fours = replace(SETTING, group_size=4, wire="modulo4")
    assert group_exchange(fours) == pytest.approx((1.5 * 531.25e6, 2 * 0.2 + 3 * (2 * 0.2 + 0.265625)))
    # Six replicas in groups of four leave a pair. Of three shifts the second is a swap.
    with_rest = replace(SETTING, replicas=6, group_size=4)
    assert group_exchange(with_rest) == pytest.approx(((4 * 3 + 2 * 1) / 6 * 4e9, 2 * 4.2 + 4.4))
    assert group_exchange(replace(SETTING, replicas=6, group_size=3)) == pytest.approx((8e9, 2 * 4.2))
    assert collectives(SETTING, 2) == all_exchange(SETTING) == pytest.approx((7e9, 2 * 7 * 0.2 + 7))
    # 34 bytes for 64 weights, half of them to 7 others in turn, and half in a ring; DiLoCo has no windows.
    for wire in ("int4", "modulo4"):
        assert all_exchange(replace(SETTING, wire=wire)) == pytest.approx((929.6875e6, 2 * 7 * 0.2 + 0.9296875))
    assert collectives(SETTING, 3) == pytest.approx((10.5e9, 3 * 7 * 0.2 + 10.5))


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


@pytest.mark.parametrize(("sync_every", "fragments"), [(12, 1), (12, 4), (2, 8), (1, 3)])
@pytest.mark.parametrize("seconds", [0.2, 0.7, 1.9, 40.0])
def test_exposed_time_of_evenly_spaced_exchanges_equals_the_replayed_wait(sync_every, fragments, seconds):
    every = sync_every / fragments
    for delay in range(sync_every + 1):
        expected = replayed(seconds, 0.6, sync_every, fragments, delay)
        np.testing.assert_allclose(exposed_seconds(seconds, every, delay, 0.6) / every, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("sync_every", "fragments"), [(10, 4), (7, 3)])
def test_exposed_time_of_unevenly_spaced_exchanges_is_near_the_replayed_wait(sync_every, fragments):
    every, step_time = sync_every / fragments, 0.6
    for seconds, delay in itertools.product(np.linspace(0.1, 3, 8).tolist(), range(sync_every + 1)):
        more = every * replayed(seconds, step_time, sync_every, fragments, delay)
        assert abs(more - exposed_seconds(seconds, every, delay, step_time)) < step_time / 10


@pytest.mark.parametrize("changes", [{}, {"latency": 0.4}, {"fragments": 5}, {"fragments": 5, "wire": "int4"}])
@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_the_smallest_delay_and_interval_are_the_first_without_a_replayed_wait(method, changes):
    setting = replace(SETTING, method=method, **changes)
    seconds = cost_of(setting, method).seconds_per_sync

    def hides(sync_every: int, delay: int) -> bool:
        return replayed(seconds, 0.5, sync_every, setting.fragments, delay) < 1e-9

    assert smallest_delay(setting, method) == next((d for d in range(11) if hides(10, d)), None)
    shortest = next(h for h in itertools.count(1) if any(hides(h, d) for d in range(h + 1)))
    assert shortest_interval(setting, method) == shortest


def test_ddp_overlaps_with_nothing_and_fsdp_with_the_whole_step():
    setting = replace(SETTING, step_time=9.0)
    assert cost_of(setting, "ddp").exposed_per_step == pytest.approx(9.8)
    assert cost_of(setting, "fsdp").exposed_per_step == pytest.approx(14.7 - 9)
    assert cost_of(replace(setting, step_time=15.0), "fsdp").compute_share == 1


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        # An exchange takes 4.4 s, a step 0.5 s.
        ({}, ("float32", 10, 9)),
        ({"delay": 3}, ("float32", 10, 9)),
        # 4 steps, 2 s, cannot hide bfloat16 (2.4 s), but int8 (0.4 s + 66 bytes for 64 weights).
        ({"sync_every": 4}, ("int8", 4, 3)),
        # No wire beats the latency: modulo4 takes 2 · 1.6 s + 2 · 0.53 s, a step 0.5 s.
        ({"sync_every": 1, "latency": 0.8}, ("modulo4", 9, 9)),
        ({"sync_every": 1, "latency": 0.8, "group_size": 3}, ("int4", 9, 9)),
        # An all-reduce takes 9.8 s in float32, 6.3 s in bfloat16, 4.6 s in int8 and 3.73 s in int4.
        ({"method": "diloco"}, ("int8", 10, 10)),
        ({"method": "diloco", "sync_every": 2}, ("int4", 8, 8)),
        # An island's exchange takes 0.5 s + 4 s, and corrections enter when they come.
        ({"islands": True}, ("float32", 10, 0)),
        ({"islands": True, "sync_every": 4}, ("int8", 4, 0)),
    ],
)
def test_fitting_changes_as_little_as_needed_and_takes_the_smallest_delay(changes, fits):
    setting = replace(SETTING, **changes)
    found = fitting(setting)
    assert (found.wire, found.sync_every, found.delay) == fits
    assert cost_of(found, found.method).exposed_per_step == 0


def test_a_tree_of_equal_messages_takes_log_n_pairs_and_a_varying_one_more():
    np.testing.assert_allclose(tree_over_pair(0, num_levels=6, num_runs=1), np.arange(1, 7))
    # 12.4 and 17 at 1,024 replicas were found independently of this program.
    np.testing.assert_allclose([tree_over_pair(v, 10, 300)[-1] for v in (0.5, 1.0)], [12.4, 17.0], rtol=0.02)


def test_all_reduces_of_two_replicas_take_the_time_of_messages_there_and_back():
    # A ring of two is a swap by a sum; a whole message goes up and down the tree.
    assert latencies_of(SETTING, 2) == pytest.approx((4.4, 4.4, 8.4))
