"""The model of runs whose subject is not the model: quick to compile, with a Llama's logical axes but "heads".

Axes: B batch, T positions, D hidden width, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from noloco_jax.config import ModelConfig
from noloco_jax.model import architecture
from noloco_jax.model.architecture import Stages, stacked, weight
from noloco_jax.model.loss import token_nll
from noloco_jax.model.placement import look_up

KIND = "support.tiny_model:Tiny"
BALANCED = "support.tiny_model:Balanced"
_COEFFICIENT = 100.0  # makes the auxiliary loss's gradient about as large as that of the likelihood


def _normal(config: ModelConfig, rngs: nnx.Rngs, *shape: int) -> jax.Array:
    return (0.02 * jax.random.normal(rngs.params(), shape)).astype(config.param_dtype)


class Block(nnx.Module):
    """A feed-forward block on the mean of the positions up to each one."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.up = weight(_normal(config, rngs, config.hidden_size, config.intermediate_size), "hidden", "ffn")
        self.down = weight(_normal(config, rngs, config.intermediate_size, config.hidden_size), "ffn", "hidden")

    def __call__(self, h_BTD: jax.Array) -> jax.Array:
        positions_1T1 = jnp.arange(1, 1 + h_BTD.shape[1])[None, :, None]
        return h_BTD + jnp.tanh(h_BTD.cumsum(axis=1) / positions_1T1 @ self.up[...]) @ self.down[...]


class Tiny(architecture.Model):
    """Blocks of two matrices between a table of tokens and a head.

    A subclass may have other blocks and name its fields otherwise, in `stages`.
    """

    stages: ClassVar[Stages] = Stages("embed", "blocks", "norm", "head")

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = weight(_normal(config, rngs, config.vocab_size, config.hidden_size), "vocab", "hidden")
        self.blocks = stacked(lambda *, rngs: Block(config, rngs=rngs), config.num_layers, rngs)
        self.norm = weight(jnp.ones(config.hidden_size, config.param_dtype), None)
        self.head = weight(_normal(config, rngs, config.hidden_size, config.vocab_size), "hidden", "vocab")

    def _field(self, place: str) -> Any:
        """Return the field that has a place in `stages`."""
        return getattr(self, getattr(self.stages, place))

    def hidden(self, ids_BT: jax.Array, *, segments_BT: jax.Array | None = None) -> jax.Array:
        return self.final_norm(self.run_blocks(self.embed_tokens(ids_BT)))

    def embed_tokens(self, ids_BT: jax.Array) -> jax.Array:
        return look_up(self._field("embedding")[...], ids_BT, self._field("embedding").dtype)

    def run_blocks(self, h_BTD: jax.Array, *, segments_BT: jax.Array | None = None) -> jax.Array:
        graphdef, blocks = nnx.split(self._field("layers"))
        return jax.lax.scan(lambda h, block: (nnx.merge(graphdef, block)(h), None), h_BTD, blocks)[0]

    def final_norm(self, h_BTD: jax.Array) -> jax.Array:
        return self._field("norm")[...][None, None] * h_BTD

    def head_kernel(self) -> jax.Array:
        return self._field("head")[...]


class Balanced(Tiny):
    """A Tiny with an auxiliary loss: the mean square of the stream after each layer, averaged over the layers."""

    def run_blocks_in_training(
        self, h_BTD: jax.Array, *, segments_BT: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        graphdef, blocks = nnx.split(self._field("layers"))

        def layer(h_BTD: jax.Array, block: Any) -> tuple[jax.Array, jax.Array]:
            h_BTD = nnx.merge(graphdef, block)(h_BTD)
            return h_BTD, jnp.mean(jnp.square(h_BTD))

        h_BTD, squares_L = jax.lax.scan(layer, h_BTD, blocks)
        return h_BTD, _COEFFICIENT / self.config.num_layers * squares_L.sum()

    def training_loss_sum(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        h_BTD, auxiliary = self.run_blocks_in_training(self.embed_tokens(batch["input_ids"]))
        total, num_labels = token_nll(self.final_norm(h_BTD), self.head_kernel(), batch["labels"])
        return total, num_labels, auxiliary * num_labels
