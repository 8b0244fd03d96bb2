"""Text generation, token by token, with a key-value cache where the model has one.

Axes: B batch, P prompt positions, S all positions (prompt and new tokens), D hidden width, V vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from noloco_jax.config import ModelConfig
from noloco_jax.model.architecture import Params, architecture_of


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
    """Continue prompts of one length; compiles once for each pair of prompt length and `max_new_tokens`.

    Args:
      config: the model.
      params: its parameters.
      prompt_ids: int32 (B, P), with at least one token.
      max_new_tokens: new tokens, at least 1.
      temperature: 0 takes the likeliest token; above 0, tokens are drawn from softmax(logits / temperature).
      top_k: draws among the k likeliest tokens only.
      key: a typed PRNG key, needed when temperature > 0.
      eos_id: the end of text. A prompt that reaches it is filled up with it; generation ends when all prompts have.

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
    max_length = prompt_length + max_new_tokens
    architecture = architecture_of(config)
    model = architecture.from_params(
        config, architecture.cast_for_generation(config, params)
    )  # cast once, not for every token

    def next_ids(h_BTD: jax.Array, position: jax.Array | int) -> jax.Array:
        """Choose the token at `position` by the hidden state before it, the last of `h_BTD`."""
        logits_BV = model.logits(h_BTD[:, -1:])[:, 0]
        if key is None:
            return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        if top_k is not None:
            least_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
            logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
        return jax.random.categorical(jax.random.fold_in(key, position), logits_BV / temperature).astype(jnp.int32)

    def last_hidden(ids_BS: jax.Array, position: jax.Array, cache: Any) -> jax.Array:
        """Return the hidden state of the token before `position`."""
        if cache is None:
            return jax.lax.dynamic_slice_in_dim(model.hidden(ids_BS), position - 1, 1, axis=1)
        return model.hidden(jax.lax.dynamic_slice_in_dim(ids_BS, position - 1, 1, axis=1), cache=cache)

    def unfinished(carry):
        position, _, _, finished_B = carry
        return (position < max_length) & ~jnp.all(finished_B)

    def step(carry):
        """Run the newest token through the model and write the one after it."""
        position, ids_BS, cache, finished_B = carry
        h_B1D = last_hidden(ids_BS, position, cache)
        return write(position, ids_BS, cache, finished_B, next_ids(h_B1D, position))

    def write(position, ids_BS, cache, finished_B, next_B):
        if eos_id is not None:
            next_B = jnp.where(finished_B, eos_id, next_B)
            finished_B |= next_B == eos_id
        ids_BS = jax.lax.dynamic_update_slice_in_dim(ids_BS, next_B[:, None], position, axis=1)
        return position + 1, ids_BS, cache, finished_B

    # Where generation ends early, what is left unwritten is the end of text.
    rest_BS = jnp.full((batch, max_new_tokens), 0 if eos_id is None else eos_id, jnp.int32)
    ids_BS = jnp.concatenate([prompt_BP, rest_BS], axis=1)
    cache = architecture.empty_cache(config, batch, max_length)
    h_BPD = model.hidden(prompt_BP) if cache is None else model.hidden(prompt_BP, cache=cache)
    first_B = next_ids(h_BPD, prompt_length)
    carry = write(jnp.int32(prompt_length), ids_BS, cache, jnp.zeros(batch, bool), first_B)
    return jax.lax.while_loop(unfinished, step, carry)[1]
