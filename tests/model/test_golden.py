"""Ten steps of a Llama against transformers in float32; `test_families` has the gradients."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file

from noloco_jax.config import ModelConfig
from noloco_jax.model import huggingface
from noloco_jax.model.architecture import loss
from support import paths

GOLDEN = paths.GOLDEN / "llama"
LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def expected_params(num_layers: int) -> Any:
    """Read the weights after ten steps from transformers' names and kernels [out, in], without the importer."""
    theirs = load_file(GOLDEN / "kv4" / "params_after_10_adam.safetensors")
    blocks = {
        ours: np.stack([theirs[f"model.layers.{layer}.{name}.weight"].T for layer in range(num_layers)])
        for ours, name in LAYER_NAMES.items()
    }
    ends = {"embed": theirs["model.embed_tokens.weight"], "norm": theirs["model.norm.weight"]}
    return ends | {"blocks": blocks, "head": theirs["lm_head.weight"].T}


def test_ten_steps_of_clipped_adam_match_transformers():
    config = ModelConfig(**huggingface.config_from_folder(GOLDEN / "kv4"))
    params = jax.tree.map(jnp.asarray, huggingface.load_params(GOLDEN / "kv4", config))
    stored = load_file(GOLDEN / "kv4" / "io.safetensors")
    batch = {name: jnp.asarray(stored[name], jnp.int32) for name in ("input_ids", "labels")}
    summary = json.loads((GOLDEN / "summary.json").read_text())["cases"]["kv4"]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(6e-4))

    @jax.jit
    def step(params, state):
        (value, _), grads = jax.value_and_grad(functools.partial(loss, config), has_aux=True)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, optax.tree.norm(grads)

    state, values, norms = jax.jit(optimizer.init)(params), [], []
    for _ in range(10):
        params, state, value, norm = step(params, state)
        values.append(value)
        norms.append(norm)
    np.testing.assert_allclose(values, summary["adam_losses"], rtol=1e-5)
    np.testing.assert_allclose(norms, summary["adam_grad_norms"], rtol=1e-4)
    # Adam divides by the root of its second moment: a gradient near zero may step either way, up to the rate each time.
    difference = jax.tree.map(lambda ours, theirs: np.abs(np.asarray(ours) - theirs), params, expected_params(2))
    assert max(jax.tree.leaves(jax.tree.map(np.max, difference))) < 6e-4
    assert max(jax.tree.leaves(jax.tree.map(np.mean, difference))) < 1e-6
