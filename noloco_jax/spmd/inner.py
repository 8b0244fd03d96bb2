"""Inner optimizer of a run and its learning-rate schedule, from the configuration."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from noloco_jax.config import InnerConfig, ModelConfig
from noloco_jax.model.architecture import Path, muons
from noloco_jax.spmd.muon import muon

PyTree = Any
# Default ratio of Adam's to Muon's learning rate, from rates that suit each: 2e-3 and 0.02.
_ADAM_SHARE = 0.1
_DECAY_SHARE = 0.2  # of the run's steps, over which "wsd" decays


def learning_rate(inner: InnerConfig, num_steps: int) -> optax.Schedule:
    """Return the schedule: a linear warm-up, lr · (i + 1) / warmup_steps at step i = 0, 1, ..., then `inner.schedule`.

    "cosine" falls to `min_lr` along half a cosine; "wsd" (warm-up, stable, decay) stays at `lr` and falls linearly to
    `min_lr` in the last fifth of the run's steps; "constant" stays at `lr`.
    """
    start = decay_start(inner, num_steps)

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        warmup = inner.lr * (step + 1) / max(inner.warmup_steps, 1)
        if inner.schedule == "cosine":
            progress = (step - inner.warmup_steps) / max(num_steps - inner.warmup_steps, 1)
            high = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(progress, 0.0, 1.0)))
        elif inner.schedule == "wsd":
            high = 1 - jnp.clip((step - start) / max(num_steps - start, 1), 0.0, 1.0)
        else:
            high = jnp.ones_like(step)
        return jnp.where(step < inner.warmup_steps, warmup, inner.min_lr + (inner.lr - inner.min_lr) * high)

    return schedule


def decay_start(inner: InnerConfig, num_steps: int) -> int:
    """Return the step (0, 1, ...) at which the decay of "wsd" starts."""
    return max(num_steps - round(_DECAY_SHARE * num_steps), inner.warmup_steps)


def learning_rates(inner: InnerConfig, num_steps: int) -> np.ndarray:
    """Return the learning rate of every inner step, on the host."""
    return np.asarray(_rates(inner, num_steps))


@partial(jax.jit, static_argnums=(0, 1))  # one program: each operation would be compiled on its own
def _rates(inner: InnerConfig, num_steps: int) -> jax.Array:
    return jnp.asarray(jax.vmap(learning_rate(inner, num_steps))(jnp.arange(num_steps)))


def at_step(state: PyTree, step: int) -> PyTree:
    """Set the schedule's position in the inner optimizer's state so that the next step is `step` (1, 2, ...)."""

    def one(part: Any) -> Any:
        if not isinstance(part, optax.ScaleByScheduleState):
            return part
        count: Any = part.count
        return part._replace(count=jax.device_put(np.full(count.shape, step - 1, count.dtype), count.sharding))

    return jax.tree.map(one, state, is_leaf=lambda part: isinstance(part, optax.ScaleByScheduleState))


def inner_optimizer(model: ModelConfig, inner: InnerConfig, num_steps: int) -> optax.GradientTransformation:
    """Build the optimizer that `inner.optimizer` names, for clipped float32 gradients of one replica."""
    schedule = learning_rate(inner, num_steps)
    if inner.optimizer != "muon":
        return _adam(inner, schedule)
    adam_share = _ADAM_SHARE if inner.adam_lr is None else inner.adam_lr / inner.lr
    return optax.partition(
        {
            "muon": muon(model, schedule, inner.momentum, inner.momentum_share, inner.weight_decay),
            "adam": _adam(inner, lambda step: adam_share * schedule(step)),
        },
        partial(_muons_and_adams, muons(model)),
    )


def _adam(inner: InnerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Build Adam, or AdamW with decoupled weight decay."""
    adam: dict[str, Any] = {"b1": inner.b1, "b2": inner.b2, "eps": inner.eps}
    if inner.optimizer == "adam":
        return optax.adam(schedule, **adam)
    return optax.adamw(schedule, weight_decay=inner.weight_decay, **adam)


def _muons_and_adams(of_muon: frozenset[Path], params: PyTree) -> PyTree:
    """Label each parameter with its optimizer: Muon for `of_muon`, Adam for the others."""
    return jax.tree.map_with_path(
        lambda path, _: "muon" if tuple(key.key for key in path) in of_muon else "adam", params
    )
