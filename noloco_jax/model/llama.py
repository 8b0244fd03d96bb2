"""Llama as a Flax NNX module: by itself in a loop of one's own, and merged from a parameter dict in the trainer.

The parameters are one plain nested dict of arrays, the layers stacked on a leading axis:

    {"embed": (V, D),
     "blocks": {"attention_norm": (L, D), "q": (L, D, H*K), "k": (L, D, G*K), "v": (L, D, G*K), "o": (L, H*K, D),
                "mlp_norm": (L, D), "gate": (L, D, F), "up": (L, D, F), "down": (L, F, D)},
     "norm": (D,), "head": (D, V)}                         ("head" is absent when the embedding serves as the head)

Axes: B batch, T positions, D hidden width, F feed-forward width, V vocabulary, L layers, H heads, G key-value heads,
K head width.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from noloco_jax.config import ModelConfig
from noloco_jax.model.attention import inverse_frequencies, rotation
from noloco_jax.model.block import KERNEL_INIT, Block, rms_norm
from noloco_jax.model.cache import Cache
from noloco_jax.model.placement import constrain

Params = dict[str, Any]

_MAX_UNROLLED_LAYERS = 16


class Llama(nnx.Module):
    """A decoder-only transformer: `model(ids_BT)` are the next-token logits (B, T, V).

    Args:
      config: sizes, dtypes and what the backward pass computes again.
      rngs: its `params` stream draws the weights: kernels and embedding normal(0.02), norm weights one.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        def kernel(*shape: int) -> nnx.Param:
            return nnx.Param(KERNEL_INIT(rngs.params(), shape, config.param_dtype))

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked_blocks(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.config = config
        self.embed = kernel(config.vocab_size, config.hidden_size)
        self.blocks = stacked_blocks(rngs)
        self.norm = nnx.Param(jnp.ones(config.hidden_size, config.param_dtype))
        if not config.tie_embeddings:
            self.head = kernel(config.hidden_size, config.vocab_size)

    @classmethod
    def from_params(cls, config: ModelConfig, params: Params) -> "Llama":
        """The module over a parameter dict, or over a part of one, as a pipeline stage holds it.

        What is missing of "embed", "blocks", "norm" and "head" stays a shape without values, and methods that need it
        fail; "blocks" may hold fewer layers than `config.num_layers`.
        """
        graphdef, shapes = _abstract(config)
        return nnx.merge(graphdef, shapes | params)

    def to_params(self) -> Params:
        """The parameter dict of the module."""
        return nnx.to_pure_dict(nnx.state(self, nnx.Param))

    def __call__(
        self, ids_BT: jax.Array, cache: Cache | None = None, segments_BT: jax.Array | None = None
    ) -> jax.Array:
        """Next-token logits (B, T, V), float32, of token ids (B, T); `cache` and `segments_BT` as of `run_blocks`."""
        return self.logits(self.hidden(ids_BT, cache, segments_BT))

    def hidden(self, ids_BT: jax.Array, cache: Cache | None = None, segments_BT: jax.Array | None = None) -> jax.Array:
        """The hidden states after the last norm (B, T, D), which the head multiplies."""
        return self.final_norm(self.run_blocks(self.embed_tokens(ids_BT), cache, segments_BT))

    @jax.named_scope("embed")
    def embed_tokens(self, ids_BT: jax.Array) -> jax.Array:
        """Look up token embeddings: (B, T, D) in the compute dtype; NaN of an id outside the vocabulary."""
        # The table stays: a device looks up its columns for the whole batch, then columns are exchanged for rows.
        table_VD, ids_BT = constrain(self.embed[...], None, ("tensor", "fsdp")), constrain(ids_BT, None, None)
        is_token_BT1 = ((ids_BT >= 0) & (ids_BT < table_VD.shape[0]))[..., None]
        h_BTD = jnp.take(table_VD, ids_BT, axis=0, mode="clip").astype(self.config.dtype)
        h_BTD = jnp.where(is_token_BT1, h_BTD, jnp.nan)
        h_BTD = constrain(constrain(h_BTD, None, None, ("tensor", "fsdp")), "fsdp", None, "tensor")
        return constrain(h_BTD, "fsdp", None, None)

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
        config = self.config
        graphdef, state = nnx.split(self.blocks)
        # Cast ahead of the loop: inside it, a copy of each kernel would be kept for the backward pass.
        params = cast_kernels(nnx.to_pure_dict(state), config.dtype)
        first = 0 if cache is None else cache.length
        rotation_1T1J = self._rotation(first + jnp.arange(h_BTD.shape[1]))

        def layer(carry: tuple[jax.Array, Cache | None], params: Params) -> tuple[Any, None]:
            h_BTD, cache = carry
            h_BTD = nnx.merge(graphdef, params)(h_BTD, rotation_1T1J, cache, segments_BT)
            return (constrain(h_BTD, "fsdp", None, None), cache), None

        # Generation has no backward pass to unroll for. The cache is carried whole: as an output of the loop, all of it
        # would be copied for every token.
        unroll = cache is None and _unrolled(config, num_layers=jax.tree.leaves(params)[0].shape[0])
        (h_BTD, filled), _ = jax.lax.scan(_recomputed(config, layer), (h_BTD, cache), params, unroll=unroll)
        if cache is not None and filled is not None:
            cache.finish_pass(filled, h_BTD.shape[1])
        return h_BTD

    def final_norm(self, h_BTD: jax.Array) -> jax.Array:
        """Normalise the residual stream after the last layer."""
        return rms_norm(h_BTD, self.norm[...], self.config.norm_eps)

    def head_kernel(self) -> jax.Array:
        """The output matrix (D, V): the embedding's transpose when they are tied."""
        return self.embed[...].T if self.config.tie_embeddings else self.head[...]

    def logits(self, h_BTD: jax.Array) -> jax.Array:
        """Next-token logits (B, T, V), float32, of the hidden states after the last norm."""
        return jnp.matmul(h_BTD, self.head_kernel().astype(h_BTD.dtype), preferred_element_type=jnp.float32)

    def _rotation(self, positions_T: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        head_dim = config.hidden_size // config.num_heads
        return rotation(inverse_frequencies(head_dim, config.rope_theta, config.rope_scaling), positions_T)


def _recomputed(config: ModelConfig, layer: Callable) -> Callable:
    """The layer with what `config.remat` says about its backward pass."""
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


@functools.cache
def _abstract(config: ModelConfig) -> tuple[nnx.GraphDef[Llama], Params]:
    """The module without its parameters, and their shapes."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(params=0))))
    return graphdef, nnx.to_pure_dict(state)


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Draw the parameter dict of a new `Llama` from a typed PRNG key."""
    return Llama(config, rngs=nnx.Rngs(params=key)).to_params()


def param_shapes(config: ModelConfig) -> Params:
    """The parameter dict as `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(lambda shape: shape, _abstract(config)[1])  # a copy: the original is cached


def num_params(config: ModelConfig) -> tuple[int, int]:
    """Return the number of parameters, in all and without the input embedding and the head."""
    shapes = param_shapes(config)
    sizes = {name: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(part)) for name, part in shapes.items()}
    return sum(sizes.values()), sizes["blocks"] + sizes["norm"]


def cast_kernels(params: Params, dtype: jax.typing.DTypeLike) -> Params:
    """Cast all parameters but the norms' weights: of the whole dict, or of a part of it."""
    return jax.tree.map_with_path(lambda path, leaf: leaf if "norm" in path[-1].key else leaf.astype(dtype), params)
