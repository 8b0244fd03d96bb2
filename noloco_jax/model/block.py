"""One decoder layer of a Llama, and its multiplication by a weight matrix.

Axes: B batch, T positions, D hidden width, F feed-forward width, H heads, G key-value heads, K head width, J = K/2;
of a multiplication I inputs, O outputs.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from noloco_jax.config import ModelConfig
from noloco_jax.model.architecture import weight
from noloco_jax.model.attention import Cache, causal_attention, rotate

KERNEL_INIT = nnx.initializers.normal(0.02)


class Block(nnx.Module):
    """Attention, then a gated feed-forward network, each on a normalised copy of its input and added to it.

    The weights of both are fields of the block, so that the parameter dict of a layer is flat.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        sizes = {
            "hidden": config.hidden_size,
            "ffn": config.intermediate_size,
            "heads": config.num_heads * config.head_size,
            "kv_heads": config.num_kv_heads * config.head_size,
            "expert": config.num_experts,
        }

        def kernel(*axes: str) -> nnx.Param:
            shape = tuple(sizes[axis] for axis in axes)
            names = (axis.removeprefix("kv_") for axis in axes)
            return weight(KERNEL_INIT(rngs.params(), shape, config.param_dtype), *names)

        def bias(fan_out: str) -> nnx.Param:
            return weight(jnp.zeros(sizes[fan_out], config.param_dtype), "heads")

        def norm(size: int) -> nnx.Param:
            return weight(jnp.ones(size, config.param_dtype), None)

        self.config = config
        self.attention_norm = norm(config.hidden_size)
        self.q = kernel("hidden", "heads")
        self.k = kernel("hidden", "kv_heads")
        self.v = kernel("hidden", "kv_heads")
        self.o = kernel("heads", "hidden")
        if config.qkv_bias:
            self.q_bias, self.k_bias, self.v_bias = bias("heads"), bias("kv_heads"), bias("kv_heads")
        if config.qk_norm:
            self.q_norm, self.k_norm = norm(config.head_size), norm(config.head_size)
        self.mlp_norm = norm(config.hidden_size)
        self.make_mlp(kernel)

    def __call__(
        self,
        h_BTD: jax.Array,
        rotation_1T1J: tuple[jax.Array, jax.Array],
        cache: Cache | None = None,
        segments_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Apply the layer to the residual stream (B, T, D); return it and the auxiliary loss, None without one.

        Args:
          h_BTD: the residual stream.
          rotation_1T1J: cosines and sines of the positions, see `attention.rotation`.
          cache: keys and values of the positions before these. None: these are the first, and all there are.
          segments_BT: without a cache, the segment of every position, which attends to that alone. None: to all.
        """
        eps = self.config.norm_eps
        with jax.named_scope("attention"):
            x_BTD = rms_norm(h_BTD, self.attention_norm[...], eps)
            h_BTD = h_BTD + self.attention(x_BTD, rotation_1T1J, cache, segments_BT)
        with jax.named_scope("mlp"):
            y_BTD, auxiliary = self.mlp(rms_norm(h_BTD, self.mlp_norm[...], eps))
            return h_BTD + y_BTD, auxiliary

    def attention(
        self,
        x_BTD: jax.Array,
        rotation_1T1J: tuple[jax.Array, jax.Array],
        cache: Cache | None = None,
        segments_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Causal grouped-query attention with rotary positions; arguments as of the layer."""

        config = self.config

        def heads(kernel: nnx.Param, bias: nnx.Param | None, count: int) -> jax.Array:
            y_BTO = _project(x_BTD, kernel)
            if bias is not None:
                # In float32, in which the gradient is then summed over the positions.
                y_BTO = (y_BTO + bias[...][None, None].astype(jnp.float32)).astype(y_BTO.dtype)
            return y_BTO.reshape(*x_BTD.shape[:-1], count, -1)

        def turned(x_BTHK: jax.Array, norm: nnx.Param | None) -> jax.Array:
            if norm is not None:
                x_BTHK = rms_norm(x_BTHK, norm[...], config.norm_eps)
            return rotate(x_BTHK, rotation_1T1J)

        q_bias, k_bias, v_bias = (self.q_bias, self.k_bias, self.v_bias) if config.qkv_bias else (None, None, None)
        q_norm, k_norm = (self.q_norm, self.k_norm) if config.qk_norm else (None, None)
        q_BTHK = turned(heads(self.q, q_bias, config.num_heads), q_norm)
        k_BTGK = turned(heads(self.k, k_bias, config.num_kv_heads), k_norm)
        v_BTGK = heads(self.v, v_bias, config.num_kv_heads)
        attend = functools.partial(causal_attention, segments_BT=segments_BT) if cache is None else cache.attend
        mixed_BTHK = attend(q_BTHK, k_BTGK, v_BTGK, window=config.sliding_window)
        return _project(mixed_BTHK.reshape(*x_BTD.shape[:-1], -1), self.o)

    def make_mlp(self, kernel: Callable[..., nnx.Param]) -> None:
        """Make the weights of the feed-forward network.

        Args:
          kernel: (*axes) -> a kernel whose dimensions have these logical axes, and their sizes.
        """
        self.gate = kernel("hidden", "ffn")
        self.up = kernel("hidden", "ffn")
        self.down = kernel("ffn", "hidden")

    def mlp(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """SwiGLU: down(silu(gate(x)) * up(x)), and no auxiliary loss."""
        return _project(swiglu(_project(x_BTD, self.gate), _project(x_BTD, self.up)), self.down), None


def _project(x_BTI: jax.Array, kernel_IO: nnx.Param) -> jax.Array:
    return dense(x_BTI, kernel_IO[...].astype(x_BTI.dtype))


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def rms_norm(x: jax.Array, weight_D: jax.Array, eps: float) -> jax.Array:
    """Divide by the root mean square over the last axis and scale, in float32; return the dtype of `x`.

    The backward pass computes it again from `x`, rather than keep float32 copies of bfloat16 activations.

    Args:
      x: (..., D), the residual stream or heads.
      weight_D: the scale.
      eps: added to the mean square.
    """
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * scale * weight_D[(None,) * (x.ndim - 1)].astype(jnp.float32)).astype(x.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False)
def swiglu(gate_BTF: jax.Array, up_BTF: jax.Array) -> jax.Array:
    """silu(gate) * up; the backward pass computes it again rather than keep four arrays of this size."""
    return jax.nn.silu(gate_BTF) * up_BTF


@jax.custom_vjp
def dense(x_BTI: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    """Return `x_BTI @ kernel_IO`, both of one dtype.

    A product over positions needs one of its operands transposed, and on the CPU the transposition fuses with the
    elementwise chain before it, which then runs through memory with a stride. JAX's own derivative transposes the
    output's cotangent, four times as wide as the input in a Llama's gate and up projections; here the narrower of the
    two is transposed. On other backends nothing changes.
    """
    return x_BTI @ kernel_IO


def _dense_forward(x_BTI: jax.Array, kernel_IO: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return x_BTI @ kernel_IO, (x_BTI, kernel_IO)


def _dense_backward(saved: tuple[jax.Array, jax.Array], d_y_BTO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BTI, kernel_IO = saved
    if x_BTI.shape[-1] <= d_y_BTO.shape[-1]:
        d_kernel_IO = jnp.einsum("bti,bto->io", x_BTI, d_y_BTO)
    else:
        # Behind a barrier, or XLA moves the last transposition to the wide operand again.
        d_kernel_OI = jnp.einsum("bto,bti->oi", d_y_BTO, x_BTI)
        d_kernel_IO = jax.lax.optimization_barrier(d_kernel_OI).T
    return jnp.einsum("bto,io->bti", d_y_BTO, kernel_IO), d_kernel_IO


dense.defvjp(_dense_forward, _dense_backward)
