"""The Llama's parameters, equal results however it is run, and rotary embedding against numpy in float64."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noloco_jax.config import ModelConfig, RopeScaling
from noloco_jax.model.architecture import init_params, loss, num_params, param_shapes
from noloco_jax.model.attention import inverse_frequencies, rotate, rotation
from noloco_jax.model.block import dense
from noloco_jax.model.llama import Llama
from support.model_makers import random_params

CONFIG = ModelConfig(
    hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2, vocab_size=61, norm_eps=1e-6
)


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jnp.asarray, random_params(CONFIG, scale=0.1))


@pytest.fixture(scope="module")
def drawn():
    """Return a function from a seed to its initial parameters."""
    init = jax.jit(functools.partial(init_params, CONFIG))
    return lambda seed: init(jax.random.key(seed))


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.integers(0, 61, (2, 10)), jnp.int32) for name in ("input_ids", "labels")}


def gradient(config):
    return lambda params, batch: jax.grad(functools.partial(loss, config), has_aux=True)(params, batch)[0]


@pytest.fixture(scope="module")
def expected_gradient(params, batch):
    return jax.jit(gradient(CONFIG))(params, batch)


def assert_close(actual, expected, atol=1e-7):
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=atol, rtol=1e-4), actual, expected)


def test_parameters_are_one_plain_dict_with_layers_stacked(drawn):
    shapes = {
        "embed": (61, 32),
        "blocks": {
            "attention_norm": (4, 32),
            "q": (4, 32, 32),
            "k": (4, 32, 16),
            "v": (4, 32, 16),
            "o": (4, 32, 32),
            "mlp_norm": (4, 32),
            "gate": (4, 32, 48),
            "up": (4, 32, 48),
            "down": (4, 48, 32),
        },
        "norm": (32,),
        "head": (32, 61),
    }
    assert jax.tree.map(lambda leaf: leaf.shape, drawn(0)) == shapes
    assert type(drawn(0)) is dict and type(drawn(0)["blocks"]) is dict
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(drawn(0)))
    described = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), param_shapes(CONFIG))
    assert described == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), drawn(0))


def test_a_tied_model_has_no_head_and_uses_the_embedding(params):
    tied = dataclasses.replace(CONFIG, tie_embeddings=True)
    assert "head" not in param_shapes(tied)
    model = Llama.from_params(tied, {"embed": params["embed"]})
    np.testing.assert_array_equal(model.head_kernel(), np.asarray(params["embed"]).T)


def test_initial_kernels_are_independent_normals_of_std_0_02_and_norms_are_one(drawn):
    params = drawn(0)
    kernels = {name: leaf for name, leaf in params["blocks"].items() if "norm" not in name}
    kernels |= {"embed": params["embed"], "head": params["head"]}
    for kernel in kernels.values():
        deviation = 0.02 / math.sqrt(kernel.size)  # standard error of the mean of as many draws
        assert abs(np.mean(kernel)) < 4 * deviation and abs(np.std(kernel) - 0.02) < 4 * deviation
    for norm in (params["norm"], params["blocks"]["attention_norm"], params["blocks"]["mlp_norm"]):
        np.testing.assert_array_equal(norm, 1.0)
    # Compare the first layer with the next one, and with another kernel of the same shape.
    draws = [np.ravel(kernel) for kernel in (kernels["q"][0], kernels["q"][1], kernels["o"][0])]
    assert np.max(np.abs(np.corrcoef(draws) - np.eye(3))) < 4 / math.sqrt(32 * 32)


def test_parameters_are_a_function_of_the_key_alone(drawn):
    jax.tree.map(np.testing.assert_array_equal, drawn(0), drawn(0))
    assert np.any(np.asarray(drawn(0)["embed"]) != np.asarray(drawn(1)["embed"]))


def test_the_count_without_embeddings_excludes_embedding_and_head_only(params):
    total, without_embeddings = num_params(CONFIG)
    assert total == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert without_embeddings == total - 2 * 61 * 32


def test_parameters_round_trip_through_the_module(params):
    jax.tree.map(np.testing.assert_array_equal, Llama.from_params(CONFIG, params).to_params(), params)


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_recomputation_changes_no_gradient(params, batch, expected_gradient, remat):
    config = dataclasses.replace(CONFIG, remat=remat)

    def mean_nll(params):
        h_BTD = Llama.from_params(config, params).hidden(batch["input_ids"])
        log_probs_BTV = jax.nn.log_softmax(h_BTD @ params["head"])
        return -jnp.mean(jnp.take_along_axis(log_probs_BTV, batch["labels"][..., None], axis=-1))

    assert_close(jax.jit(jax.grad(mean_nll))(params), expected_gradient)


def test_full_recomputation_keeps_less_for_the_backward_pass(params):
    ids_BT = jnp.zeros((4, 64), jnp.int32)

    def kept(remat):
        config = dataclasses.replace(CONFIG, remat=remat)
        gradient = jax.jit(jax.grad(lambda params: Llama.from_params(config, params).hidden(ids_BT).sum()))
        analysis = gradient.lower(params).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert kept("full") < kept("dots") < kept("none")


def test_bfloat16_computes_near_float32_and_keeps_float32_masters(params, batch, expected_gradient):
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    assert Llama.from_params(config, params).hidden(batch["input_ids"]).dtype == jnp.bfloat16
    grads = jax.jit(gradient(config))(params, batch)
    for actual, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_gradient), strict=True):
        assert actual.dtype == jnp.float32
        cosine = np.vdot(actual, expected) / (np.linalg.norm(actual) * np.linalg.norm(expected))
        assert cosine > 0.999


def test_rotation_turns_pair_j_at_position_t_by_t_times_its_frequency():
    x_BTHK = np.random.default_rng(0).standard_normal((2, 50, 3, 8))
    inverse_J = 500.0 ** (-np.arange(4) / 4)
    # A pair (x_j, x_{j+4}) as one complex number, turned.
    turned = (x_BTHK[..., :4] + 1j * x_BTHK[..., 4:]) * np.exp(1j * np.arange(50)[:, None, None] * inverse_J)
    rotation_1T1J = rotation(inverse_frequencies(8, 500.0), jnp.arange(50))
    actual = rotate(jnp.asarray(x_BTHK, jnp.float32), rotation_1T1J)
    np.testing.assert_allclose(actual, np.concatenate([turned.real, turned.imag], axis=-1), atol=2e-5)


@pytest.mark.parametrize(("head_dim", "factor"), [(128, 8.0), (64, 32.0)])
def test_llama3_scaling_slows_long_wavelengths_and_blends_between(head_dim, factor):
    original, low, high = 8192, 1.0, 4.0
    expected = []
    for j in range(head_dim // 2):
        frequency = 500000.0 ** (-2 * j / head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength > original / low:
            frequency = frequency / factor
        elif wavelength >= original / high:
            smooth = (original / wavelength - low) / (high - low)
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        expected.append(frequency)
    actual_J = inverse_frequencies(head_dim, 500000.0, RopeScaling(factor, low, high, original))
    assert actual_J.dtype == np.float32
    np.testing.assert_allclose(actual_J, expected, rtol=5e-6)
    unscaled_J = inverse_frequencies(head_dim, 500000.0)
    assert np.any(actual_J == unscaled_J) and np.any(actual_J == unscaled_J / np.float32(factor))


@pytest.mark.parametrize(("width_in", "width_out"), [(3, 5), (5, 3), (4, 4)])
def test_gradients_of_dense_equal_those_of_the_product(width_in, width_out):
    rng = np.random.default_rng(0)
    x_BTI, kernel_IO, d_y_BTO = (
        rng.normal(size=shape) for shape in [(2, 7, width_in), (width_in, width_out), (2, 7, width_out)]
    )
    with jax.enable_x64(True):
        y_BTO, pull_back = jax.vjp(dense, x_BTI, kernel_IO)
        d_x_BTI, d_kernel_IO = pull_back(d_y_BTO)
    np.testing.assert_allclose(y_BTO, np.einsum("bti,io->bto", x_BTI, kernel_IO), rtol=1e-12)
    np.testing.assert_allclose(d_x_BTI, np.einsum("bto,io->bti", d_y_BTO, kernel_IO), rtol=1e-12)
    np.testing.assert_allclose(d_kernel_IO, np.einsum("bti,bto->io", x_BTI, d_y_BTO), rtol=1e-12)


def test_gradients_of_biases_are_summed_in_float32():
    """Summed in bfloat16 over these 16,384 positions, that of the queries' bias is off by a tenth."""
    biased = dataclasses.replace(CONFIG, qkv_bias=True, num_layers=1)
    params = random_params(biased, scale=0.3)
    ids_BT = jnp.asarray(np.random.default_rng(0).zipf(1.5, (64, 257)) % biased.vocab_size)
    batch = {"input_ids": ids_BT[:, :-1], "labels": ids_BT[:, 1:]}

    def gradients(dtype):
        config = dataclasses.replace(biased, dtype=dtype)
        blocks = jax.jit(jax.grad(lambda params: loss(config, params, batch)[0]))(params)["blocks"]
        return {name: np.asarray(x, np.float64) for name, x in blocks.items() if name in ("q_bias", "v_bias")}

    exact = gradients("float32")
    for name, found in gradients("bfloat16").items():
        assert np.linalg.norm(found - exact[name]) < 0.02 * np.linalg.norm(exact[name]), name
