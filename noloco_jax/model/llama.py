"""Llama in Flax NNX, and the pure functions over its parameters that the trainer transforms.

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
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from noloco_jax.config.fields import ModelConfig
from noloco_jax.model.attention import causal_attention
from noloco_jax.model.dense import dense
from noloco_jax.model.placement import constrain
from noloco_jax.model.rope import inverse_frequencies, rotate, rotation

Params = dict[str, Any]

_KERNEL_INIT = nnx.initializers.normal(0.02)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def rms_norm(x_BTD: jax.Array, weight_D: jax.Array, eps: float) -> jax.Array:
    """Divides by the root mean square over D and scales, in float32; returns the dtype of `x_BTD`.

    The backward pass computes it again from `x_BTD`, rather than keep float32 copies of bfloat16 activations.
    """
    x32_BTD = x_BTD.astype(jnp.float32)
    scale_BT1 = jax.lax.rsqrt(jnp.mean(jnp.square(x32_BTD), axis=-1, keepdims=True) + eps)
    return (x32_BTD * scale_BT1 * weight_D[None, None].astype(jnp.float32)).astype(x_BTD.dtype)


class Block(nnx.Module):
    """One decoder layer: attention, then a gated feed-forward network, each on a normalised copy and added back."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        def kernel(*shape: int) -> nnx.Param:
            return nnx.Param(_KERNEL_INIT(rngs.params(), shape, config.param_dtype))

        width, ffn = config.hidden_size, config.intermediate_size
        head_dim = width // config.num_heads
        self.config = config
        self.attention_norm = nnx.Param(jnp.ones(width, config.param_dtype))
        self.q = kernel(width, config.num_heads * head_dim)
        self.k = kernel(width, config.num_kv_heads * head_dim)
        self.v = kernel(width, config.num_kv_heads * head_dim)
        self.o = kernel(config.num_heads * head_dim, width)
        self.mlp_norm = nnx.Param(jnp.ones(width, config.param_dtype))
        self.gate = kernel(width, ffn)
        self.up = kernel(width, ffn)
        self.down = kernel(ffn, width)

    def __call__(self, h_BTD: jax.Array, rotation_1T1J: tuple[jax.Array, jax.Array]) -> jax.Array:
        return self.finish(h_BTD, causal_attention(*self.queries_keys_values(h_BTD, rotation_1T1J)))

    def queries_keys_values(
        self, h_BTD: jax.Array, rotation_1T1J: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns rotated queries (B, T, H, K), rotated keys and values (B, T, G, K)."""
        x_BTD = rms_norm(h_BTD, self.attention_norm[...], self.config.norm_eps)

        def heads(kernel: nnx.Param, count: int) -> jax.Array:
            return dense(x_BTD, kernel[...].astype(x_BTD.dtype)).reshape(*x_BTD.shape[:-1], count, -1)

        q_BTHK = rotate(heads(self.q, self.config.num_heads), rotation_1T1J)
        k_BTGK = rotate(heads(self.k, self.config.num_kv_heads), rotation_1T1J)
        return q_BTHK, k_BTGK, heads(self.v, self.config.num_kv_heads)

    def finish(self, h_BTD: jax.Array, mixed_BTHK: jax.Array) -> jax.Array:
        """The layer from the attention's result on."""
        dtype = h_BTD.dtype
        h_BTD = h_BTD + dense(mixed_BTHK.reshape(*h_BTD.shape[:-1], -1), self.o[...].astype(dtype))
        x_BTD = rms_norm(h_BTD, self.mlp_norm[...], self.config.norm_eps)
        gate_BTF, up_BTF = (dense(x_BTD, kernel[...].astype(dtype)) for kernel in (self.gate, self.up))
        return h_BTD + dense(_gated(gate_BTF, up_BTF), self.down[...].astype(dtype))


@functools.partial(jax.checkpoint, prevent_cse=False)
def _gated(gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
    """SwiGLU's product; the backward pass computes it again rather than keep four arrays of this size."""
    return jax.nn.silu(gate_BTF) * up_BTF


class Llama(nnx.Module):
    """The whole model; `nnx.to_pure_dict(nnx.state(model))` is the parameter dict of the functions below."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        def kernel(*shape: int) -> nnx.Param:
            return nnx.Param(_KERNEL_INIT(rngs.params(), shape, config.param_dtype))

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

    def __call__(self, ids_BT: jax.Array) -> jax.Array:
        return logits(self.config, nnx.to_pure_dict(nnx.state(self, nnx.Param)), ids_BT)


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Draws the parameters from a typed PRNG key: kernels and embedding normal(0.02), norm weights one."""
    model = Llama(config, rngs=nnx.Rngs(params=key))
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def param_shapes(config: ModelConfig) -> Params:
    """The parameter dict as `jax.ShapeDtypeStruct`s."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def num_params(config: ModelConfig) -> tuple[int, int]:
    """Returns the number of parameters, in all and without the input embedding and the head."""
    shapes = param_shapes(config)
    sizes = {name: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(part)) for name, part in shapes.items()}
    return sum(sizes.values()), sizes["blocks"] + sizes["norm"]


def embed(config: ModelConfig, params: Params, ids_BT: jax.Array) -> jax.Array:
    """Looks up token embeddings: (B, T, D) in the compute dtype."""
    # The table is not moved: a device looks up its columns for the whole batch, then columns are exchanged for rows.
    table_VD, ids_BT = constrain(params["embed"], None, ("tensor", "fsdp")), constrain(ids_BT, None, None)
    h_BTD = jnp.take(table_VD, ids_BT, axis=0, mode="clip").astype(config.dtype)
    h_BTD = constrain(constrain(h_BTD, None, None, ("tensor", "fsdp")), "fsdp", None, "tensor")
    return constrain(h_BTD, "fsdp", None, None)


@functools.cache
def block_graphdef(config: ModelConfig) -> nnx.GraphDef[Block]:
    """The static half of a layer: `nnx.merge(block_graphdef(config), params_of_one_layer)` is a `Block`."""
    return nnx.graphdef(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0))))


def layer_rotation(config: ModelConfig, positions_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rotary cosines and sines that every layer shares, for these positions."""
    head_dim = config.hidden_size // config.num_heads
    return rotation(inverse_frequencies(head_dim, config.rope_theta, config.rope_scaling), positions_T)


def run_layers(config: ModelConfig, blocks_params: Params, h_BTD: jax.Array) -> jax.Array:
    """Applies the stacked layers in turn, at positions 0 to T-1.

    Args:
      config: the model; `remat` says what the backward pass recomputes: nothing ("none"), everything but a layer's
        input ("full"), or everything but the results of its weight matrices ("dots").
      blocks_params: `params["blocks"]`, or a contiguous part of it along the leading axis (a pipeline stage).
      h_BTD: the residual stream.
    """
    unroll = _layers_an_iteration(config, jax.tree.leaves(blocks_params)[0].shape[0])
    rotation_1T1J = layer_rotation(config, jnp.arange(h_BTD.shape[1]))
    graphdef = block_graphdef(config)

    def layer(h_BTD: jax.Array, layer_params: Params) -> tuple[jax.Array, None]:
        return constrain(nnx.merge(graphdef, layer_params)(h_BTD, rotation_1T1J), "fsdp", None, None), None

    # A loop keeps the two passes of a layer apart, so that nothing merges what is computed again with the first time.
    if config.remat == "full":
        layer = jax.checkpoint(layer, prevent_cse=False)
    elif config.remat == "dots":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        layer = jax.checkpoint(layer, prevent_cse=False, policy=policy)
    return jax.lax.scan(layer, h_BTD, cast_kernels(config, blocks_params), unroll=unroll)[0]


def _layers_an_iteration(config: ModelConfig, num_layers: int) -> int:
    """All layers where they are few: a loop stacks what it keeps, a tenth of a step on the CPU, much traffic on a GPU.

    Not where they are computed again: out of a loop XLA's CPU compiler undoes that.
    """
    return num_layers if num_layers <= 16 and config.remat == "none" else 1


def cast_kernels(config: ModelConfig, blocks_params: Params) -> Params:
    """Casts the kernels once, ahead of the loop: cast inside it, a copy of each would be kept for the backward pass."""
    return {name: leaf if "norm" in name else leaf.astype(config.dtype) for name, leaf in blocks_params.items()}


def final_hidden(config: ModelConfig, params: Params, ids_BT: jax.Array) -> jax.Array:
    """The hidden states after the last norm: what the head multiplies."""
    h_BTD = run_layers(config, params["blocks"], embed(config, params, ids_BT))
    return rms_norm(h_BTD, params["norm"], config.norm_eps)


def head_kernel(params: Params) -> jax.Array:
    """The output matrix (D, V): the embedding's transpose when they are tied."""
    return params["head"] if "head" in params else params["embed"].T


def logits(config: ModelConfig, params: Params, ids_BT: jax.Array) -> jax.Array:
    """Next-token logits (B, T, V) in float32."""
    h_BTD = final_hidden(config, params, ids_BT)
    return jnp.matmul(h_BTD, head_kernel(params).astype(h_BTD.dtype), preferred_element_type=jnp.float32)
