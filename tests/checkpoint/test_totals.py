"""Throughput over a sliding window of steps."""

from noloco_jax.checkpoint.totals import Throughput


def test_throughput_is_the_windows_tokens_over_its_seconds():
    now = [0.0]
    meter = Throughput(window=2, clock=lambda: now[0])
    assert meter.tokens_per_second == 0.0
    for seconds in (10.0, 1.0, 3.0):  # the first falls out of the window
        now[0] += seconds
        meter.step(100)
    assert meter.tokens_per_second == 200 / 4.0


def test_throughput_excludes_everything_before_a_reset():
    now = [0.0]
    meter = Throughput(clock=lambda: now[0])
    meter.step(100)
    now[0] = 50.0
    meter.reset()
    now[0] = 52.0
    meter.step(100)
    assert meter.tokens_per_second == 50.0
