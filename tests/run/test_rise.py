"""A loss that rises is told, one that is noisy or falls is not."""

import numpy as np

from noloco_jax.run.rise import Rise


def told(losses):
    rise = Rise()
    return [step for step, loss in enumerate(losses, 1) if rise.told(step, loss)]


def noisy(losses, seed=0):
    return losses * (1 + 0.15 * np.random.default_rng(seed).normal(size=len(losses)))


def test_a_falling_and_a_level_loss_are_not_told_however_noisy():
    assert told(noisy(np.linspace(6, 2, 2000))) == []
    assert told(noisy(np.full(2000, 2.0))) == []


def test_the_first_steps_may_rise():
    assert told(np.concatenate([np.linspace(5, 9, 40), np.full(200, 4.0)])) == []


def test_a_rise_is_told_once_for_every_fifth():
    """The loss rises by a fifth three times from 2.0 to 4.0: 1.2^3 = 1.73."""
    losses = np.concatenate([np.full(300, 2.0), np.linspace(2, 4, 300), np.full(20, 4.0)])
    steps = told(losses)
    assert len(steps) == 3
    assert 360 <= steps[0] <= 400


def test_the_line_names_both_losses_and_what_to_lower():
    rise = Rise()
    lines = [line for step in range(1, 400) if (line := rise.told(step, 2.0 if step < 200 else 5.0))]
    assert "2.00 at step" in lines[0] and "inner.lr" in lines[0]
