"""Warnings about a rising loss, but none about a noisy, constant or falling one."""

import numpy as np
import pytest

from noloco_jax.run.rise import Rise


def warned_steps(losses):
    rise = Rise()
    return [step for step, loss in enumerate(losses, 1) if rise.told(step, loss)]


def noisy(losses, seed):
    """Vary losses by a quarter, in part from document to document of ten steps, as those of 256 bytes a step do."""
    rng = np.random.default_rng(seed)
    documents = np.repeat(rng.normal(size=len(losses) // 10), 10)
    return losses * (1 + 0.22 * rng.normal(size=len(losses)) + 0.08 * documents)


@pytest.mark.parametrize("seed", range(4))
def test_a_noisy_falling_or_constant_loss_does_not_warn(seed):
    assert warned_steps(noisy(np.linspace(6, 2, 2000), seed)) == []
    assert warned_steps(noisy(np.full(2000, 2.0), seed)) == []


def test_a_rise_in_the_first_steps_does_not_warn():
    assert warned_steps(np.concatenate([np.linspace(5, 9, 40), np.full(200, 4.0)])) == []


def test_a_rising_loss_warns_once_per_twenty_percent():
    """From 2.0 to 4.0 the loss rises by 20 % three times: 1.2^3 = 1.73."""
    losses = np.concatenate([np.full(300, 2.0), np.linspace(2, 4, 300), np.full(100, 4.0)])
    steps = warned_steps(losses)
    assert len(steps) == 3
    assert 400 <= steps[0] <= 450


def test_the_warning_names_the_lowest_loss_and_the_setting_to_lower():
    rise = Rise()
    lines = [line for step in range(1, 400) if (line := rise.told(step, 2.0 if step < 200 else 5.0))]
    assert "2.00 at step" in lines[0] and "inner.lr" in lines[0]
