"""Text generation with a key-value cache.

Axes: B batch, P prompt positions, S cache positions (prompt and new tokens), D hidden width, V vocabulary, L layers,
H heads, G key-value heads, K head width.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from noloco_jax.config.fields import ModelConfig
from noloco_jax.model.attention import causal_attention
from noloco_jax.model.llama import (
    Params,
    block_graphdef,
    cast_kernels,
    embed,
    head_kernel,
    layer_rotation,
    rms_norm,
)

Cache = tuple[jax.Array, jax.Array]  # keys and values, both (L, B, S, G, K)


def generate(
    config: ModelConfig,
    params: Params,
    prompt_ids: ArrayLike,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    key: jax.Array | None = None,
    eos_id: int | None = None,
) -> jax.Array:
    """Continues prompts of one length; compiles once for each length of prompt and continuation.

    Args:
      config: the model.
      params: its parameters.
      prompt_ids: int32 (B, P), with at least one token.
      max_new_tokens: new tokens, at least 1.
      temperature: 0 takes the likeliest token; above, tokens are drawn from softmax(logits / temperature).
      top_k: draws among the k likeliest tokens only.
      key: a typed PRNG key, needed when temperature > 0.
      eos_id: a prompt that has come to this token goes on with nothing but it; generation ends when all have.

    Returns the prompts and their continuations, int32 (B, P + max_new_tokens).
    """
    if temperature > 0 and key is None:
        raise ValueError("temperature > 0 draws tokens: give a key")
    return _generate(
        config,
        params,
        jnp.asarray(prompt_ids, jnp.int32),
        key if temperature > 0 else None,
        jnp.float32(temperature),
        max_new_tokens=max_new_tokens,
        top_k=top_k,
        eos_id=eos_id,
    )


@functools.partial(jax.jit, static_argnames=("config", "max_new_tokens", "top_k", "eos_id"))
def _generate(config, params, prompt_BP, key, temperature, *, max_new_tokens, top_k, eos_id):
    batch, prompt_length = prompt_BP.shape
    blocks = cast_kernels(config, params["blocks"])
    kernel_DV = head_kernel(params).astype(config.dtype)

    def next_ids(h_BD: jax.Array, position: jax.Array | int) -> jax.Array:
        normed_BD = rms_norm(h_BD[:, None], params["norm"], config.norm_eps)[:, 0]
        logits_BV = jnp.matmul(normed_BD, kernel_DV, preferred_element_type=jnp.float32)
        if key is None:
            return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        if top_k is not None:
            least_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
            logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
        return jax.random.categorical(jax.random.fold_in(key, position), logits_BV / temperature).astype(jnp.int32)

    def more(carry):
        position, _, _, finished_B = carry
        return (position < prompt_length + max_new_tokens) & ~jnp.all(finished_B)

    def step(carry):
        """Feeds the newest token through the layers and writes the one after it."""
        position, ids_BS, cache, finished_B = carry
        newest_B1 = jax.lax.dynamic_slice_in_dim(ids_BS, position - 1, 1, axis=1)
        h_B1D, cache = _decode(config, blocks, embed(config, params, newest_B1), cache, position - 1)
        return record(position, ids_BS, cache, finished_B, next_ids(h_B1D[:, 0], position))

    def record(position, ids_BS, cache, finished_B, next_B):
        if eos_id is not None:
            next_B = jnp.where(finished_B, eos_id, next_B)
            finished_B |= next_B == eos_id
        ids_BS = jax.lax.dynamic_update_slice_in_dim(ids_BS, next_B[:, None], position, axis=1)
        return position + 1, ids_BS, cache, finished_B

    # What an early end leaves unwritten is the end of text.
    rest_BS = jnp.full((batch, max_new_tokens), 0 if eos_id is None else eos_id, jnp.int32)
    ids_BS = jnp.concatenate([prompt_BP, rest_BS], axis=1)
    h_BPD, cache = _prefill(config, blocks, embed(config, params, prompt_BP), max_new_tokens)
    first_B = next_ids(h_BPD[:, -1], prompt_length)
    carry = record(jnp.int32(prompt_length), ids_BS, cache, jnp.zeros(batch, bool), first_B)
    return jax.lax.while_loop(more, step, carry)[1]


def _prefill(config: ModelConfig, blocks: Params, h_BPD: jax.Array, room: int) -> tuple[jax.Array, Cache]:
    """Runs the layers over whole prompts; returns the hidden states and a cache with room for `room` more positions."""
    rotation = layer_rotation(config, jnp.arange(h_BPD.shape[1]))

    def layer(h_BPD, layer_params):
        block = nnx.merge(block_graphdef(config), layer_params)
        q_BPHK, k_BPGK, v_BPGK = block.queries_keys_values(h_BPD, rotation)
        padding = ((0, 0), (0, room), (0, 0), (0, 0))
        # cuDNN may refuse a prompt's length, and without a gradient flash attention gains little.
        mixed_BPHK = causal_attention(q_BPHK, k_BPGK, v_BPGK, allow_flash=False)
        h_BPD = block.finish(h_BPD, mixed_BPHK)
        return h_BPD, (jnp.pad(k_BPGK, padding), jnp.pad(v_BPGK, padding))

    return jax.lax.scan(layer, h_BPD, blocks)


def _decode(
    config: ModelConfig, blocks: Params, h_B1D: jax.Array, cache: Cache, position: jax.Array
) -> tuple[jax.Array, Cache]:
    """Runs the layers over the one token at `position`, which sees the cache up to and with itself."""
    rotation = layer_rotation(config, position[None])
    seen_B = jnp.full(h_B1D.shape[0], position + 1)

    def layer(carry, xs):
        # The cache is carried whole: as an output of the loop, all of it would be copied for every token.
        h_B1D, keys_LBSGK, values_LBSGK = carry
        layer_params, index = xs
        block = nnx.merge(block_graphdef(config), layer_params)
        q_B1HK, k_B1GK, v_B1GK = block.queries_keys_values(h_B1D, rotation)
        at = (index, 0, position, 0, 0)
        keys_LBSGK = jax.lax.dynamic_update_slice(keys_LBSGK, k_B1GK[None], at)
        values_LBSGK = jax.lax.dynamic_update_slice(values_LBSGK, v_B1GK[None], at)
        mixed_B1HK = jax.nn.dot_product_attention(
            q_B1HK, keys_LBSGK[index], values_LBSGK[index], key_value_seq_lengths=seen_B, implementation="xla"
        )
        return (block.finish(h_B1D, mixed_B1HK), keys_LBSGK, values_LBSGK), None

    indices_L = jnp.arange(cache[0].shape[0])
    (h_B1D, keys_LBSGK, values_LBSGK), _ = jax.lax.scan(layer, (h_B1D, *cache), (blocks, indices_L))
    return h_B1D, (keys_LBSGK, values_LBSGK)
