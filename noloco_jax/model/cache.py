"""The key-value cache of text generation.

Axes: B batch, T new positions, S cache positions, L layers, H heads, G key-value heads, K head width.
"""

import dataclasses

import jax
import jax.numpy as jnp

from noloco_jax.config import ModelConfig
from noloco_jax.model.attention import attention_from


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
        """Take over what a pass of all layers over `num_positions` new ones has written into its copy, `filled`."""
        self.keys_LBSGK, self.values_LBSGK = filled.keys_LBSGK, filled.values_LBSGK
        self.length += num_positions
