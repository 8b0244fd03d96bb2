"""Rotary position embedding in Hugging Face's layout: the first half of a head rotates against the second.

Axes: B batch, T positions, H heads, K head width, J = K/2 rotated pairs.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def inverse_frequencies(head_dim: int, theta: float, scaling: Any = None) -> np.ndarray:
    """Returns the float32 angle per position of every rotated pair, shape (head_dim / 2,).

    Args:
      head_dim: K, even.
      theta: the base; pair j turns by theta**(-2j/K) radians a position.
      scaling: None, or Llama 3's `RopeScaling` (factor, low_freq_factor, high_freq_factor,
        original_max_position_embeddings): pairs whose wavelength exceeds original/low turn `factor` times slower, those
        under original/high are left alone, those between are blended linearly in original/wavelength.
    """
    inverse_J = np.float32(1.0) / np.float32(theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    if scaling is None:
        return inverse_J
    turns_J = scaling.original_max_position_embeddings * inverse_J / np.float32(2 * math.pi)
    kept_J = (turns_J - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_J = np.clip(kept_J, 0.0, 1.0)
    return ((1.0 - kept_J) * inverse_J / scaling.factor + kept_J * inverse_J).astype(np.float32)


def rotation(inverse_J: np.ndarray, positions_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns float32 (cosines, sines), each (1, T, 1, J): they broadcast over batch and heads."""
    angles_1T1J = positions_T.astype(jnp.float32)[None, :, None, None] * inverse_J[None, None, None, :]
    return jnp.cos(angles_1T1J), jnp.sin(angles_1T1J)


def rotate(x_BTHK: jax.Array, rotation_1T1J: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns every pair (x_j, x_{j+J}) by its position's angle, in float32; returns the dtype of `x_BTHK`."""
    cos, sin = rotation_1T1J
    first, second = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTHK.dtype)
