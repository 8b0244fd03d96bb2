"""Causal grouped-query attention by the backend's fastest kernel, rotary position embedding, and the key-value cache.

Axes: B batch, T queries, S keys, L layers, H heads, G key-value heads, R = H/G queries a key-value head, K head width,
J = K/2 rotated pairs. Rotation is in Hugging Face's layout: the first half of a head rotates against the second.
"""

import dataclasses
import math
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from noloco_jax.config import ModelConfig
from noloco_jax.model.placement import map_shards

# Queries of one block of the CPU's attention: a block leaves out the keys after its last query.
_CPU_BLOCK = 128


def causal_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segments_BT: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Softmax attention of every position over itself and those before it, softmax in float32; returns (B, T, H, K).

    On a GPU this is `jax.nn.dot_product_attention`, through cuDNN's flash attention where that applies (a GPU of
    compute capability 8.0 or more, 16-bit floats, heads no wider than 128 in steps of 8, with segments an even number
    of positions). On the CPU its XLA form takes about twice as long as `_cpu_attention`.

    Args:
      q_BTHK, k_BTGK, v_BTGK: queries, keys and values.
      segments_BT: int32, the segment of every position, which attends to that segment alone. None: to all.
      window: the last positions, itself among them, to which a position attends. None: all.
    """
    if jax.default_backend() == "cpu":
        return _cpu_attention(q_BTHK, k_BTGK, v_BTGK, segments_BT, window)
    length, head_dim = q_BTHK.shape[1], q_BTHK.shape[-1]
    flash = (
        jax.default_backend() == "gpu"
        and _ampere_or_later()
        and q_BTHK.dtype in (jnp.bfloat16, jnp.float16)
        and head_dim % 8 == 0
        and head_dim <= 128
        and (segments_BT is None or length % 2 == 0)
    )
    if flash:
        heads = ("fsdp", None, "tensor", None)
        arguments: list[tuple[jax.Array, tuple[str | None, ...]]] = [(x, heads) for x in (q_BTHK, k_BTGK, v_BTGK)]
        if segments_BT is not None:
            arguments.append((segments_BT, ("fsdp", None)))
        return map_shards(partial(_library_attention, "cudnn", window), *arguments)
    return _library_attention("xla", window, q_BTHK, k_BTGK, v_BTGK, segments_BT)


def _library_attention(
    implementation: Literal["cudnn", "xla"],
    window: int | None,
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """JAX's attention. For cuDNN the mask becomes 16-bit numbers (B, 1, T, T), the same for all heads and layers.

    A window is in the mask where there is one, as cuDNN need not support both; else cuDNN skips what lies outside.
    """
    sides = None if window is None else (window - 1, 0)
    mask_B1TT = None
    if segments_BT is not None:
        mask_B1TT = _same_segment(segments_BT, segments_BT)[:, None]
        if window is not None:
            positions_T = jnp.arange(q_BTHK.shape[1])
            mask_B1TT, sides = mask_B1TT & _near(positions_T, positions_T, window)[None, None], None
    return jax.nn.dot_product_attention(
        q_BTHK,
        k_BTGK,
        v_BTGK,
        mask=mask_B1TT,
        is_causal=True,
        local_window_size=sides,
        implementation=implementation,
    )


def _near(queries_T: jax.Array, keys_S: jax.Array, window: int) -> jax.Array:
    """Compare positions: bool (T, S), True where a key is less than `window` positions before a query."""
    return keys_S[None] > queries_T[:, None] - window


def _same_segment(queries_BT: jax.Array, keys_BS: jax.Array) -> jax.Array:
    """Compare each query's segment with each key's: bool (B, T, S)."""
    return queries_BT[:, :, None] == keys_BS[:, None, :]


def attention_from(
    start: jax.Array, q_BTHK: jax.Array, keys_BSGK: jax.Array, values_BSGK: jax.Array, window: int | None = None
) -> jax.Array:
    """Softmax attention of the positions `start` to `start` + T - 1 over positions 0 up to themselves; (B, T, H, K).

    Keys and values after a position, or `window` or more before it, are masked, whatever they hold. cuDNN is not used:
    it may refuse a length, and without a gradient it gains little.
    """
    positions_T = start + jnp.arange(q_BTHK.shape[1])
    positions_S = jnp.arange(keys_BSGK.shape[1])
    seen_TS = positions_S[None] <= positions_T[:, None]
    if window is not None:
        seen_TS &= _near(positions_T, positions_S, window)
    return jax.nn.dot_product_attention(q_BTHK, keys_BSGK, values_BSGK, mask=seen_TS[None, None], implementation="xla")


def _ampere_or_later() -> bool:
    """Return True for an NVIDIA Ampere GPU or newer.

    AMD's compute capabilities are names. A device without the attribute is one that is only compiled for: it counts as
    new.
    """
    major = getattr(jax.local_devices()[0], "compute_capability", "8.0").partition(".")[0]
    return major.isdecimal() and int(major) >= 8


def _cpu_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segments_BT: jax.Array | None,
    window: int | None,
) -> jax.Array:
    """Attention in blocks of queries, with heads ahead of positions, so that each step is a plain matrix product.

    A block leaves out keys that none of its queries attends to. The softmax is normalised last, where its array is
    smallest.
    """
    batch, length, heads, head_dim = q_BTHK.shape
    kv_heads = k_BTGK.shape[2]
    q_BGRTK = q_BTHK.reshape(batch, length, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
    q_BGRTK = q_BGRTK * jnp.asarray(head_dim**-0.5, q_BTHK.dtype)
    k_BGSK, v_BGSK = k_BTGK.swapaxes(1, 2), v_BTGK.swapaxes(1, 2)
    blocks = []
    for start in range(0, length, _CPU_BLOCK):
        stop = min(start + _CPU_BLOCK, length)
        first = 0 if window is None else max(0, start + 1 - window)
        scores_BGRTS = jnp.einsum(
            "bgrtk,bgsk->bgrts",
            q_BGRTK[:, :, :, start:stop],
            k_BGSK[:, :, first:stop],
            preferred_element_type=jnp.float32,
        )
        queries_T, keys_S = jnp.arange(start, stop), jnp.arange(first, stop)
        seen_TS = keys_S[None] <= queries_T[:, None]
        if window is not None:
            seen_TS &= _near(queries_T, keys_S, window)
        scores_BGRTS += jnp.where(seen_TS, 0.0, -jnp.inf)[None, None, None]  # an added mask needs no derivative
        if segments_BT is not None:
            same_BTS = _same_segment(segments_BT[:, start:stop], segments_BT[:, first:stop])
            scores_BGRTS += jnp.where(same_BTS, 0.0, -jnp.inf)[:, None, None]
        highest = jax.lax.stop_gradient(scores_BGRTS.max(axis=-1, keepdims=True))
        weights_BGRTS = jnp.exp(scores_BGRTS - highest)
        mixed_BGRTK = jnp.einsum(
            "bgrts,bgsk->bgrtk",
            weights_BGRTS.astype(v_BTGK.dtype),
            v_BGSK[:, :, first:stop],
            preferred_element_type=jnp.float32,
        )
        blocks.append(mixed_BGRTK / weights_BGRTS.sum(axis=-1, keepdims=True))
    mixed_BGRTK = jnp.concatenate(blocks, axis=3).astype(q_BTHK.dtype)
    return mixed_BGRTK.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, head_dim)


def inverse_frequencies(head_dim: int, theta: float, scaling: Any = None) -> np.ndarray:
    """Return the float32 angle per position of every rotated pair, shape (head_dim / 2,).

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
    """Return float32 (cosines, sines), each (1, T, 1, J): they broadcast over batch and heads."""
    angles_1T1J = positions_T.astype(jnp.float32)[None, :, None, None] * inverse_J[None, None, None, :]
    return jnp.cos(angles_1T1J), jnp.sin(angles_1T1J)


def rotate(x_BTHK: jax.Array, rotation_1T1J: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turn every pair (x_j, x_{j+J}) by its position's angle, in float32; return the dtype of `x_BTHK`."""
    cos, sin = rotation_1T1J
    first, second = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTHK.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Cache:
    """The keys and values of every layer, a pytree that the layers' attention changes in place, one after the other.

    Attributes:
      keys_LBSGK, values_LBSGK: room for S positions, of which the first `length` are filled.
      length: int32, the positions that all layers have seen.
      layer: int32, the layer whose turn it is.
    """

    keys_LBSGK: jax.Array
    values_LBSGK: jax.Array
    length: jax.Array
    layer: jax.Array

    @classmethod
    def empty(cls, config: ModelConfig, batch_size: int, max_length: int) -> "Cache":
        """A cache for `max_length` positions, in the compute dtype."""
        shape = (config.num_layers, batch_size, max_length, config.num_kv_heads, config.head_size)
        zero = jnp.zeros([], jnp.int32)
        return cls(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype), zero, zero)

    def attend(self, q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, window: int | None = None) -> jax.Array:
        """Write a layer's keys and values of T new positions, and let those attend to all positions up to their own.

        With a window they attend to its positions alone; the others are kept all the same.

        Returns the mixed values (B, T, H, K); the next layer's turn is next.
        """
        start = (self.layer, 0, self.length, 0, 0)
        self.keys_LBSGK = jax.lax.dynamic_update_slice(self.keys_LBSGK, k_BTGK[None], start)
        self.values_LBSGK = jax.lax.dynamic_update_slice(self.values_LBSGK, v_BTGK[None], start)
        keys_BSGK, values_BSGK = self.keys_LBSGK[self.layer], self.values_LBSGK[self.layer]
        self.layer += 1
        return attention_from(self.length, q_BTHK, keys_BSGK, values_BSGK, window)

    def finish_pass(self, filled: "Cache", num_positions: int) -> None:
        """Take over the cache that a pass of all layers over `num_positions` new positions has filled."""
        self.keys_LBSGK, self.values_LBSGK = filled.keys_LBSGK, filled.values_LBSGK
        self.length += num_positions
