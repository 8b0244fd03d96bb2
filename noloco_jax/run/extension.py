"""Messages on how resuming with other steps or another schedule changes the learning rate."""

from dataclasses import replace

import numpy as np

from noloco_jax.config import TrainConfig
from noloco_jax.spmd.inner import decay_start, learning_rate


def rate_after(config: TrainConfig, step: int) -> float:
    """Return the learning rate of the step after `step` (0, 1, ...), also beyond the run's last step."""
    return float(np.asarray(learning_rate(config.inner, config.num_steps)(step)))


def rate_change(before: TrainConfig, now: TrainConfig, step: int) -> str:
    """Describe the change of the learning rate after `step` between two configurations; empty if there is none."""
    old, new = rate_after(before, step), rate_after(now, step)
    if old == new:
        return ""
    return f"learning rate of step {step + 1}: {old:.3g} before, {new:.3g} now ({_name(now)})"


def extension_note(before: TrainConfig, now: TrainConfig, steps: int) -> str:
    """Describe how to extend a run that has taken all its steps, and the resulting learning rate.

    Args:
      before: the configuration with which the run finished.
      now: the configuration to continue with.
      steps: inner steps taken.
    """
    longer = replace(now, num_steps=2 * steps)
    note = (
        f"raise num_steps to continue: the learning rate, {rate_after(before, steps - 1):.3g} at the end, is then "
        f"{rate_after(longer, steps):.3g} with num_steps={longer.num_steps} ({_name(now)})"
    )
    if before.inner.schedule != "wsd":
        return note
    start = decay_start(before.inner, before.num_steps)
    return f"{note}; --from_step goes back to a checkpoint of step {start} or before, where its decay began"


def _name(config: TrainConfig) -> str:
    return f"inner.schedule={config.inner.schedule!r}"
