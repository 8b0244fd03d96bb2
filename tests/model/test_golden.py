"""The Llama against float32 figures of transformers' LlamaForCausalLM: loss, gradients, ten optimizer steps."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from noloco_jax.config import ModelConfig
from noloco_jax.model import huggingface
from noloco_jax.model.kind import Params, loss
from support import paths

GOLDEN = paths.GOLDEN / "llama"


@dataclasses.dataclass
class Case:
    config: ModelConfig
    params: Params
    io: dict[str, np.ndarray]
    folder: Path

    @property
    def batch(self):
        return {name: jnp.asarray(self.io[name], jnp.int32) for name in ("input_ids", "labels")}

    @property
    def summary(self):
        return json.loads((GOLDEN / "summary.json").read_text())["cases"][self.folder.name]

    def in_our_layout(self, name):
        """Read tensors stored under transformers' names, kernels [out, in], without the importer."""
        theirs = load_file(self.folder / name)
        layer_names = {
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
        layers = range(self.config.num_layers)
        blocks = {
            ours: np.stack([theirs[f"model.layers.{layer}.{name}.weight"].T for layer in layers])
            for ours, name in layer_names.items()
        }
        ours = {"embed": theirs["model.embed_tokens.weight"], "blocks": blocks, "norm": theirs["model.norm.weight"]}
        return ours if self.config.tie_embeddings else ours | {"head": theirs["lm_head.weight"].T}


@pytest.fixture(params=["kv4", "kv4_tied"])
def case(request):
    folder = GOLDEN / request.param
    config = ModelConfig(**huggingface.config_from_folder(folder))
    params = jax.tree.map(jnp.asarray, huggingface.load_params(folder, config))
    return Case(config, params, load_file(folder / "io.safetensors"), folder)


def assert_trees_close(actual, expected, atol, rtol=0.0):
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=atol, rtol=rtol), actual, expected)


def test_loss_and_every_gradient_match_transformers(case):
    value_and_grad = jax.jit(jax.value_and_grad(functools.partial(loss, case.config), has_aux=True))
    (value, num_tokens), grads = value_and_grad(case.params, case.batch)
    assert num_tokens == np.sum(case.io["labels"] != -100)
    np.testing.assert_allclose(value, case.io["loss"], rtol=1e-6)
    assert_trees_close(grads, case.in_our_layout("grads.safetensors"), atol=1e-6)
    norm = np.sqrt(sum(np.square(leaf, dtype=np.float64).sum() for leaf in jax.tree.leaves(grads)))
    np.testing.assert_allclose(norm, case.io["grad_norm"], rtol=1e-6)


def test_ten_steps_of_clipped_adam_match_transformers(case):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(6e-4))

    @jax.jit
    def step(params, state):
        (value, _), grads = jax.value_and_grad(functools.partial(loss, case.config), has_aux=True)(params, case.batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, optax.tree.norm(grads)

    params, state = case.params, jax.jit(optimizer.init)(case.params)
    values, norms = [], []
    for _ in range(10):
        params, state, value, norm = step(params, state)
        values.append(value)
        norms.append(norm)
    np.testing.assert_allclose(values, case.summary["adam_losses"], rtol=1e-5)
    np.testing.assert_allclose(norms, case.summary["adam_grad_norms"], rtol=1e-4)
    # Adam divides by the root of its second moment: a gradient near zero may step either way, up to the rate each time.
    expected = case.in_our_layout("params_after_10_adam.safetensors")
    difference = jax.tree.map(lambda ours, theirs: np.abs(np.asarray(ours) - theirs), params, expected)
    assert max(jax.tree.leaves(jax.tree.map(np.max, difference))) < 6e-4
    assert max(jax.tree.leaves(jax.tree.map(np.mean, difference))) < 1e-6
