"""What going on with other steps or another schedule does to the learning rate, in a line for people."""

from dataclasses import replace

import numpy as np

from noloco_jax.config import TrainConfig
from noloco_jax.spmd.inner import decay_start, learning_rate


def rate_after(config: TrainConfig, step: int) -> float:
    """The learning rate of the step after `step` (0, 1, ...), also where that is beyond the run's last."""
    return float(np.asarray(learning_rate(config.inner, config.num_steps)(step)))


def rate_change(before: TrainConfig, now: TrainConfig, step: int) -> str:
    """The learning rate of the step after `step` under two configurations; empty where they agree."""
    old, new = rate_after(before, step), rate_after(now, step)
    if old == new:
        return ""
    return f"learning rate of step {step + 1}: {old:.3g} before, {new:.3g} now ({_name(now)})"


def extension_note(before: TrainConfig, now: TrainConfig, steps: int) -> str:
    """How to go on with a run that has taken all its steps, and what that does to the learning rate.

    Args:
      before: the configuration with which the run came to its end.
      now: the one to go on with.
      steps: those that are taken.
    """
    longer = replace(now, num_steps=2 * steps)
    note = (
        f"raise num_steps to go on: the learning rate, {rate_after(before, steps - 1):.3g} at the end, is then "
        f"{rate_after(longer, steps):.3g} with num_steps={longer.num_steps} ({_name(now)})"
    )
    if before.inner.schedule != "wsd":
        return note
    start = decay_start(before.inner, before.num_steps)
    return f"{note}; --from_step goes back to a checkpoint of step {start} or before, where its decay began"


def _name(config: TrainConfig) -> str:
    return f"inner.schedule={config.inner.schedule!r}"
