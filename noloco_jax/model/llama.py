"""Llama and its family, Mistral and Qwen 2 and 3, as a Flax NNX module.

It is trained by itself in a loop of one's own, and merged from a parameter dict in the trainer.

The parameters are one plain nested dict of arrays, the layers stacked on a leading axis:

    {"embed": (V, D),
     "blocks": {"attention_norm": (L, D), "q": (L, D, H*K), "k": (L, D, G*K), "v": (L, D, G*K), "o": (L, H*K, D),
                "q_bias": (L, H*K), "k_bias": (L, G*K), "v_bias": (L, G*K), "q_norm": (L, K), "k_norm": (L, K),
                "mlp_norm": (L, D), "gate": (L, D, F), "up": (L, D, F), "down": (L, F, D)},
     "norm": (D,), "head": (D, V)}
    ("head" is absent when the embedding serves as the head, biases and head norms where the configuration has none)

Axes: B batch, T positions, D hidden width, F feed-forward width, V vocabulary, L layers, H heads, G key-value heads,
K head width.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from noloco_jax.config import ModelConfig
from noloco_jax.model.architecture import Model, Params, Stages, stacked, weight
from noloco_jax.model.attention import Cache, inverse_frequencies, rotation
from noloco_jax.model.block import KERNEL_INIT, Block, rms_norm
from noloco_jax.model.placement import constrain, look_up

_MAX_UNROLLED_LAYERS = 16


class Llama(Model):
    """A decoder-only transformer: `model(ids_BT)` are the next-token logits (B, T, V).

    Args:
      config: sizes, dtypes and what the backward pass computes again.
      rngs: its `params` stream draws the weights: kernels and embedding normal(0.02), norm weights one.
    """

    stages: ClassVar[Stages] = Stages("embed", "blocks", "norm", "head")
    block: ClassVar[type[Block]] = Block

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        def table(*shape: int) -> jax.Array:
            return KERNEL_INIT(rngs.params(), shape, config.param_dtype)

        self.config = config
        self.embed = weight(table(config.vocab_size, config.hidden_size), "vocab", "hidden")
        self.blocks = stacked(functools.partial(self.block, config), config.num_layers, rngs)
        self.norm = weight(jnp.ones(config.hidden_size, config.param_dtype), None)
        if not config.tie_embeddings:
            self.head = weight(table(config.hidden_size, config.vocab_size), "hidden", "vocab")

    def __call__(
        self, ids_BT: jax.Array, cache: Cache | None = None, segments_BT: jax.Array | None = None
    ) -> jax.Array:
        """Next-token logits (B, T, V), float32, of token ids (B, T); `cache` and `segments_BT` as of `run_blocks`."""
        return self.logits(self.hidden(ids_BT, cache, segments_BT))

    def hidden(self, ids_BT: jax.Array, cache: Cache | None = None, segments_BT: jax.Array | None = None) -> jax.Array:
        """Return the hidden states after the last norm (B, T, D), for the output layer."""
        return self.final_norm(self.run_blocks(self.embed_tokens(ids_BT), cache, segments_BT))

    @jax.named_scope("embed")
    def embed_tokens(self, ids_BT: jax.Array) -> jax.Array:
        """Look up token embeddings: (B, T, D) in the compute dtype; NaN of an id outside the vocabulary."""
        return look_up(self.embed[...], ids_BT, self.config.dtype)

    def run_blocks(
        self, h_BTD: jax.Array, cache: Cache | None = None, segments_BT: jax.Array | None = None
    ) -> jax.Array:
        """Apply the stacked layers in turn to the residual stream (B, T, D).

        `config.remat` says what the backward pass computes again: nothing ("none"), everything but a layer's input
        ("full"), or everything but the results of its weight matrices ("dots").

        Args:
          h_BTD: the residual stream.
          cache: the T positions follow those in the cache, and are added to it. None: they are positions 0 to T - 1.
          segments_BT: without a cache, the document of every position, int32: attention stays inside it. Positions go
            on from one to the next, as rotary attention sees their differences alone. None: all is one document.
        """
        return self._run(h_BTD, cache, segments_BT)[0]

    def _run(
        self, h_BTD: jax.Array, cache: Cache | None, segments_BT: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Do as `run_blocks` does; return the auxiliary loss of every layer (L,) too, None where layers have none."""
        config = self.config
        graphdef, state = nnx.split(self.blocks)
        # Cast ahead of the loop: inside it, a copy of each kernel would be kept for the backward pass.
        params = cast_kernels(nnx.to_pure_dict(state), config.dtype)
        first = 0 if cache is None else cache.length
        rotation_1T1J = self._rotation(first + jnp.arange(h_BTD.shape[1]))

        def layer(carry: tuple[jax.Array, Cache | None], params: Params) -> tuple[Any, jax.Array | None]:
            h_BTD, cache = carry
            h_BTD, auxiliary = nnx.merge(graphdef, params)(h_BTD, rotation_1T1J, cache, segments_BT)
            return (constrain(h_BTD, "fsdp", None, None), cache), auxiliary

        # Generation has no backward pass to unroll for. The cache is carried whole: as an output of the loop, all of it
        # would be copied for every token.
        unroll = cache is None and _unrolled(config, num_layers=jax.tree.leaves(params)[0].shape[0])
        (h_BTD, filled), auxiliary_L = jax.lax.scan(_recomputed(config, layer), (h_BTD, cache), params, unroll=unroll)
        if cache is not None and filled is not None:
            cache.finish_pass(filled, h_BTD.shape[1])
        return h_BTD, auxiliary_L

    def final_norm(self, h_BTD: jax.Array) -> jax.Array:
        """Normalise the residual stream after the last layer."""
        return rms_norm(h_BTD, self.norm[...], self.config.norm_eps)

    def head_kernel(self) -> jax.Array:
        """The output matrix (D, V): the embedding's transpose when they are tied."""
        return self.embed[...].T if self.config.tie_embeddings else self.head[...]

    @classmethod
    def forward_flops(cls, config: ModelConfig, length: int) -> float:
        """Count 2 operations per weight of a matrix multiplication, and causal attention's products of scores, values.

        Of the T x T scores half are counted: 2 products x 2 x T/2 x heads x head size per layer; with a window of
        W < T tokens, W - W²/2T in place of T/2. A document mask changes nothing, so that runs with and without it are
        comparable.
        """
        queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        window = length if config.sliding_window is None else min(config.sliding_window, length)
        layer = config.hidden_size * (2 * queries + 2 * keys) + cls.mlp_weights(config)
        weights = config.num_layers * layer + config.hidden_size * config.vocab_size
        return 2 * weights + config.num_layers * 4 * (window - window * window / (2 * length)) * queries

    @classmethod
    def mlp_weights(cls, config: ModelConfig) -> int:
        """Count the weights of a layer's feed-forward network that multiply one token."""
        return 3 * config.hidden_size * config.intermediate_size

    @classmethod
    def mlp_width(cls, config: ModelConfig) -> int:
        """Count the numbers of a layer's feed-forward network that one token passes through."""
        return config.intermediate_size

    @classmethod
    def kept_numbers(cls, config: ModelConfig) -> int:
        """Estimate as `Model.kept_numbers` does, also where the heads together are wider or narrower than the stream.

        A window leaves it as it is, since scores are not kept.
        """
        queries = config.num_heads * config.head_size
        everything = 6 * config.hidden_size + 4 * queries + 4 * cls.mlp_width(config)
        kept = {"none": everything, "dots": 2 * config.hidden_size + 4 * queries, "full": 0, "stage": 0}
        return config.num_layers * (kept[config.remat] + config.hidden_size)

    @classmethod
    def empty_cache(cls, config: ModelConfig, batch_size: int, max_length: int) -> Cache:
        return Cache.empty(config, batch_size, max_length)

    @classmethod
    def cast_for_generation(cls, config: ModelConfig, params: Params) -> Params:
        return cast_kernels(params, config.dtype)

    def _rotation(self, positions_T: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        return rotation(inverse_frequencies(config.head_size, config.rope_theta, config.rope_scaling), positions_T)


def _recomputed(config: ModelConfig, layer: Callable) -> Callable:
    """Return the layer with the rematerialization that `config.remat` names."""
    # prevent_cse=False: the loop itself keeps XLA from merging the second computation of a layer with the first.
    if config.remat == "full":
        return jax.checkpoint(layer, prevent_cse=False)
    if config.remat == "dots":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return jax.checkpoint(layer, prevent_cse=False, policy=policy)
    return layer


def _unrolled(config: ModelConfig, num_layers: int) -> bool:
    """Return True to unroll the layers in training: few layers, and no rematerialization.

    A loop stacks what the backward pass needs, which takes a tenth of a step on the CPU and much traffic on a GPU. But
    without a loop XLA's CPU compiler merges a rematerialized computation with the first one.
    """
    return num_layers <= _MAX_UNROLLED_LAYERS and config.remat == "none"


def cast_kernels(params: Params, dtype: jax.typing.DTypeLike) -> Params:
    """Cast all parameters but the weights of norms and routers: of the whole dict, or of a part of it."""

    def one(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        name = path[-1].key
        return leaf if "norm" in name or name == "router" else leaf.astype(dtype)

    return jax.tree.map_with_path(one, params)
