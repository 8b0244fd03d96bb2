"""Models of a user's own, which no room of the package knows: neither is a transformer or has a Llama's names.

Axes: B batch, T positions, D hidden width, V vocabulary.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from noloco_jax.config import ModelConfig
from noloco_jax.model import architecture
from noloco_jax.model.architecture import Stages, stacked, weight
from noloco_jax.model.placement import look_up
from support.tiny_model import Tiny


def draw(rngs: nnx.Rngs, *shape: int) -> jax.Array:
    return 0.1 * jax.random.normal(rngs.params(), shape)


class Model(architecture.Model):
    """The token before, turned by a matrix, and this one."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.tokens = weight(draw(rngs, config.vocab_size, config.hidden_size), "vocab", "hidden")
        self.turn = weight(draw(rngs, config.hidden_size, config.hidden_size), "hidden", None)
        self.scale = weight(jnp.ones(config.hidden_size), None)
        self.answers = weight(draw(rngs, config.hidden_size, config.vocab_size), "hidden", "vocab")

    def hidden(self, ids_BT: jax.Array, *, segments_BT: jax.Array | None = None) -> jax.Array:
        h_BTD = look_up(self.tokens[...], ids_BT, self.tokens.dtype)
        before_BTD = jnp.pad(h_BTD, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return self.scale[...][None, None] * jnp.tanh(h_BTD + before_BTD @ self.turn[...])

    def head_kernel(self) -> jax.Array:
        return self.answers[...]


class Gate(nnx.Module):
    """A layer: each position takes a learned share of the running mean."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.share = weight(draw(rngs, config.hidden_size, config.hidden_size), None, "hidden")

    def __call__(self, h_BTD: jax.Array) -> jax.Array:
        positions_1T1 = jnp.arange(1, 1 + h_BTD.shape[1])[None, :, None]
        return h_BTD + jnp.tanh(h_BTD.cumsum(axis=1) / positions_1T1 @ self.share[...])


class Layered(Tiny):
    """Layers that pipeline stages share out, under other names than a Llama's."""

    stages: ClassVar[Stages] = Stages("tokens", "gates", "scale", "answers")

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.tokens = weight(draw(rngs, config.vocab_size, config.hidden_size), "vocab", "hidden")
        self.gates = stacked(lambda *, rngs: Gate(config, rngs=rngs), config.num_layers, rngs)
        self.scale = weight(jnp.ones(config.hidden_size), None)
        self.answers = weight(draw(rngs, config.hidden_size, config.vocab_size), "hidden", "vocab")
