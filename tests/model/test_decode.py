"""Generation with a key-value cache against the plain forward pass, run again from the start for every token."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noloco_jax.config import ModelConfig, RopeScaling
from noloco_jax.model import architecture, huggingface
from noloco_jax.model.attention import Cache
from noloco_jax.model.decode import generate
from noloco_jax.model.llama import Llama
from support.model_makers import random_params
from support.paths import SHARED

STORIES = SHARED / "data" / "checkpoints" / "stories260K"

CONFIG = ModelConfig(
    hidden_size=32, intermediate_size=64, num_layers=3, num_heads=4, num_kv_heads=2, vocab_size=61, tie_embeddings=True
)
PROMPTS_BP = np.array([[3, 14, 15, 9], [26, 5, 35, 8]], np.int32)


@pytest.fixture(scope="module")
def params():
    # The large scale separates logits so far that rounding cannot change their argmax.
    return random_params(CONFIG, scale=0.3)


def assert_greedy(config, params, prompts_BP, count):
    """Check that each new token is the argmax of a plain forward pass over those before it."""
    ids_BS = np.asarray(generate(config, params, prompts_BP, max_new_tokens=count))

    @jax.jit
    def logits(params, ids_BT):
        model = architecture.from_params(config, params)
        return model.logits(model.hidden(ids_BT))

    length = prompts_BP.shape[1]
    np.testing.assert_array_equal(ids_BS[:, :length], prompts_BP)
    expected_BT = np.argmax(logits(params, ids_BS[:, :-1]), axis=-1)
    np.testing.assert_array_equal(ids_BS[:, length:], expected_BT[:, length - 1 :])


EVERY_PART = {"head_dim": 12, "qkv_bias": True, "qk_norm": True, "sliding_window": 5}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tie_embeddings": False, "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 8)},
        {"tie_embeddings": False, **EVERY_PART},
        {"tie_embeddings": False, "kind": "moe", "qk_norm": True, "num_experts": 6, "experts_per_token": 2},
        {"tie_embeddings": False, "kind": "support.own_model:Model"},
    ],
    ids=["tied", "llama3_rope", "every part", "experts", "a user's own"],
)
def test_cached_greedy_decoding_is_the_argmax_of_the_plain_forward_pass(change):
    config = dataclasses.replace(CONFIG, **change)
    assert_greedy(config, random_params(config, scale=0.3), PROMPTS_BP, 12)


def test_a_prompt_of_one_token_and_one_new_token_work(params):
    assert_greedy(CONFIG, params, PROMPTS_BP[:, :1], 1)


def test_hidden_states_computed_in_pieces_with_a_cache_equal_the_whole(params):
    rng = np.random.default_rng(1)
    ids_BT = jnp.asarray(rng.integers(0, CONFIG.vocab_size, (2, 9)), jnp.int32)

    @jax.jit
    def both_ways(params):
        model, cache = Llama.from_params(CONFIG, params), Cache.empty(CONFIG, batch_size=2, max_length=12)
        pieces = [model.hidden(ids_BT[:, start:stop], cache) for start, stop in ((0, 4), (4, 5), (5, 9))]
        return jnp.concatenate(pieces, axis=1), model.hidden(ids_BT), cache.length

    in_pieces_BTD, whole_BTD, length = both_ways(params)
    assert length == 9
    np.testing.assert_allclose(in_pieces_BTD, whole_BTD, atol=1e-5)


def test_cache_entries_beyond_its_length_are_ignored(params):
    @jax.jit
    def hidden(params, rest):
        cache = Cache.empty(CONFIG, batch_size=2, max_length=8)
        cache.keys_LBSGK += rest
        cache.values_LBSGK -= rest
        return Llama.from_params(CONFIG, params).hidden(jnp.asarray(PROMPTS_BP), cache)

    np.testing.assert_array_equal(hidden(params, 3.0), hidden(params, 0.0))


def test_generation_does_not_use_cudnn(params, monkeypatch):
    used = []

    def attention(*args, implementation, **kwargs):
        used.append(implementation)
        return plain(*args, implementation=implementation, **kwargs)

    plain = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    generate(dataclasses.replace(CONFIG, dtype="bfloat16"), params, PROMPTS_BP, max_new_tokens=2)
    assert used == ["xla", "xla"]  # for the prompt, for the tokens after it


def test_a_finished_prompt_repeats_the_end_of_text_while_others_continue(params):
    free_BS = np.asarray(generate(CONFIG, params, PROMPTS_BP, max_new_tokens=12))
    eos_id = int(free_BS[0, 6])
    first_B = [4 + list(row[4:]).index(eos_id) if eos_id in row[4:] else len(row) for row in free_BS]
    ended_BS = generate(CONFIG, params, PROMPTS_BP, max_new_tokens=12, eos_id=eos_id)
    for free_S, ended_S, first in zip(free_BS, ended_BS, first_B, strict=True):
        np.testing.assert_array_equal(ended_S[:first], free_S[:first])
        np.testing.assert_array_equal(ended_S[first:], eos_id)


def test_top_1_sampling_is_greedy(params):
    sampled_BS = generate(
        CONFIG, params, PROMPTS_BP, max_new_tokens=12, temperature=1.0, top_k=1, key=jax.random.key(3)
    )
    np.testing.assert_array_equal(sampled_BS, generate(CONFIG, params, PROMPTS_BP, max_new_tokens=12))


def test_sampling_draws_from_the_tempered_softmax_of_the_top_k(params):
    draws = 4000
    prompts_BP = np.tile(PROMPTS_BP[:1], (draws, 1))
    ids_BS = generate(CONFIG, params, prompts_BP, max_new_tokens=1, temperature=2.0, top_k=5, key=jax.random.key(7))
    logits_V = np.asarray(Llama.from_params(CONFIG, params)(jnp.asarray(PROMPTS_BP[:1])))[0, -1].astype(np.float64)
    logits_V[logits_V < np.sort(logits_V)[-5]] = -np.inf
    expected_V = np.exp((logits_V - logits_V.max()) / 2.0)
    expected_V /= expected_V.sum()
    counts_V = np.bincount(np.asarray(ids_BS)[:, -1], minlength=CONFIG.vocab_size)
    deviation_V = np.sqrt(draws * expected_V * (1 - expected_V))
    assert np.all(np.abs(counts_V - draws * expected_V) <= 4.5 * deviation_V)


@pytest.mark.skipif(not STORIES.is_dir(), reason="the checkpoint of ../shared is not here")
def test_a_trained_grouped_query_llama_reproduces_its_golden_story():
    config = ModelConfig(**huggingface.config_from_folder(STORIES))
    params = jax.tree.map(jnp.asarray, huggingface.load_params(STORIES, config))
    golden = json.loads((STORIES / "greedy_golden.json").read_text())["greedy_ids"]
    ids_BS = generate(config, params, np.array([golden[:1]]), max_new_tokens=len(golden) - 1)
    assert np.asarray(ids_BS)[0].tolist() == golden
