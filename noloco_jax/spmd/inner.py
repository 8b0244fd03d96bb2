"""The optimizers of a run, from its configuration."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from noloco_jax.config.fields import InnerConfig, TrainConfig
from noloco_jax.outer.diloco import diloco
from noloco_jax.outer.noloco import noloco
from noloco_jax.outer.pairing import RandomPairing

# Where replicas live in the trainer's programs: devices, and the replicas of one device.
REPLICAS = ("replica", "slot")


def learning_rate(inner: InnerConfig, num_steps: int) -> optax.Schedule:
    """Linear warmup, then a cosine to `min_lr`: step i = 0, 1, ... of the warmup uses lr · (i + 1) / warmup_steps."""

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        warmup = inner.lr * (step + 1) / max(inner.warmup_steps, 1)
        progress = (step - inner.warmup_steps) / max(num_steps - inner.warmup_steps, 1)
        cosine = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(progress, 0.0, 1.0)))
        return jnp.where(step < inner.warmup_steps, warmup, inner.min_lr + (inner.lr - inner.min_lr) * cosine)

    return schedule


def learning_rates(config: TrainConfig) -> np.ndarray:
    """The learning rate of every inner step, on the host."""
    return np.asarray(jax.vmap(learning_rate(config.inner, config.num_steps))(jnp.arange(config.num_steps)))


def inner_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Adam (with decoupled weight decay, if any) on gradients that are clipped already."""
    inner = config.inner
    schedule = learning_rate(inner, config.num_steps)
    adam: dict[str, Any] = {"b1": inner.b1, "b2": inner.b2, "eps": inner.eps}
    if inner.weight_decay:
        return optax.adamw(schedule, weight_decay=inner.weight_decay, **adam)
    return optax.adam(schedule, **adam)


def run_pairing(config: TrainConfig) -> RandomPairing:
    """Who averages with whom in a noloco run: a function of its seed alone, whatever devices it runs on."""
    return RandomPairing(config.num_replicas, config.outer.group_size, config.seed)


def outer_optimizer(config: TrainConfig) -> optax.GradientTransformationExtraArgs | None:
    """The outer optimizer, or None for the methods that have no outer step."""
    outer = config.outer
    if config.method == "noloco":
        return noloco(
            run_pairing(config),
            outer_lr=outer.lr,
            outer_momentum=outer.momentum,
            consensus=outer.consensus,
            sync_every=outer.sync_every,
            axis_name=REPLICAS,
            state_dtype=outer.state_dtype,
            wire_dtype=None if outer.wire == "float32" else outer.wire,
        )
    if config.method == "diloco":
        return diloco(
            outer_lr=outer.lr,
            outer_momentum=outer.momentum,
            nesterov=outer.nesterov,
            sync_every=outer.sync_every,
            axis_name=REPLICAS,
            state_dtype=outer.state_dtype,
        )
    return None
