"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): momentum with orthogonalized matrices.

Axes: L stacked layers, I inputs and O outputs of a layer's matrix; M the smaller of the two, N the larger.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from noloco_jax.config import ModelConfig
from noloco_jax.model.placement import constrain, num_devices
from noloco_jax.spmd.sharding import parameter_spec

# Chosen for their slope at zero: singular values converge to between 0.7 and 1.2 rather than to 1.
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
_EPS = 1e-8
_INSIDE_A_REPLICA = ("fsdp", "tensor")
PyTree = Any


def muon(
    model: ModelConfig, learning_rate: optax.Schedule, momentum: float, share: float | None, weight_decay: float
) -> optax.GradientTransformation:
    """Momentum, orthogonalized matrix by matrix, for parameters that are matrices or stacks (..., I, O).

    An update is approximately learning rate · sqrt(max(1, O / I)) · U Vᵀ with the momentum's singular vectors U, V, as
    in `optax.contrib.muon`, which offers no hook between momentum and iteration for resharding the matrices.

    Args:
      model: the model of the parameters, for their shardings.
      learning_rate: schedule over steps 0, 1, ...
      momentum: decay of the gradients' sum, per step.
      share: the share ν of the gradients' mean in what is orthogonalized, ν mean + (1 - ν) gradient: the
        quasi-hyperbolic momentum of Ma and Yarats 2018, arXiv 1810.06801, equation 4. None: ν = `momentum`, which is
        Nesterov's.
      weight_decay: decoupled weight decay; a step subtracts learning rate · weight_decay · weight.
    """
    return optax.chain(
        _quasi_hyperbolic(momentum, share),
        optax.stateless(lambda updates, _: jax.tree.map_with_path(partial(_orthogonal, model), updates)),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def _quasi_hyperbolic(decay: float, share: float | None) -> optax.GradientTransformation:
    """Map a gradient to share · mean + (1 - share) · gradient, up to a factor, which orthogonalizing drops."""
    sums = optax.trace(decay)
    weight = decay if share is None else share * (1 - decay) / (1 - share)

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        sum_of_gradients, state = sums.update(updates, state, params)
        return jax.tree.map(lambda g, m: g + weight * m, updates, sum_of_gradients), state

    return optax.GradientTransformation(sums.init, update)


def _orthogonal(model: ModelConfig, path: tuple, x: jax.Array) -> jax.Array:
    fan_in, fan_out = x.shape[-2:]
    axes = P(None, *parameter_spec(model, path)[-2:])  # layers and experts become one stack
    stack_LIO = _on_whole_matrices(newton_schulz, x.reshape(-1, fan_in, fan_out), axes)
    return max(1.0, fan_out / fan_in) ** 0.5 * stack_LIO.reshape(x.shape)


def _on_whole_matrices(fn: Callable[[jax.Array], jax.Array], x_LIO: jax.Array, axes: P) -> jax.Array:
    """Apply `fn` to a stack with whole matrices distributed over the devices, rather than shards of each matrix.

    An all-to-all over each axis gathers the matrices, and another one shards them again. Without it the partitioner
    would sum the Gram matrices over devices in every iteration. A stack that the devices do not divide is padded with
    zeros.

    Args:
      fn: maps a stack, matrix by matrix.
      x_LIO: the stack.
      axes: the mesh axes that shard its dimensions, before and after.
    """
    num_parts, num_layers = math.prod(map(num_devices, _INSIDE_A_REPLICA)), x_LIO.shape[0]
    if num_parts == 1:
        return fn(x_LIO)
    # Axes are moved one at a time: for two at once the partitioner would gather the whole stack on every device.
    moved = [_INSIDE_A_REPLICA[:count] for count in range(len(_INSIDE_A_REPLICA) + 1)]
    specs = [(layers, *(None if axis in layers else axis for axis in axes[1:])) for layers in moved]
    x_LIO = jnp.pad(x_LIO, ((0, -num_layers % num_parts), (0, 0), (0, 0)))
    for spec in specs:
        x_LIO = constrain(x_LIO, *spec)
    x_LIO = fn(x_LIO)
    for spec in reversed(specs):
        x_LIO = constrain(x_LIO, *spec)
    return x_LIO[:num_layers]


def newton_schulz(x_LIO: jax.Array) -> jax.Array:
    """Bring the singular values of every matrix near 1 by odd polynomials, x <- a x + b (x xᵀ) x + c (x xᵀ)² x."""
    wide = x_LIO.shape[-2] <= x_LIO.shape[-1]
    x_LMN = x_LIO if wide else x_LIO.mT
    x_LMN = x_LMN / (jnp.linalg.norm(x_LMN, axis=(-2, -1), keepdims=True) + _EPS)
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram_LMM = x_LMN @ x_LMN.mT
        x_LMN = a * x_LMN + (b * gram_LMM + c * gram_LMM @ gram_LMM) @ x_LMN
    return x_LMN if wide else x_LMN.mT
