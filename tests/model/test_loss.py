"""The loss against a plain softmax in numpy, for any size of chunks."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from noloco_jax.config import ModelConfig
from noloco_jax.data.source import IGNORED_LABEL
from noloco_jax.model.architecture import loss
from noloco_jax.model.loss import token_nll
from support.model_makers import random_params

B, T, D, V = 3, 10, 16, 37


@pytest.fixture
def inputs():
    rng = np.random.default_rng(0)
    h_BTD, kernel_DV = rng.standard_normal((B, T, D)), 0.5 * rng.standard_normal((D, V))
    labels_BT = rng.integers(0, V, (B, T))
    labels_BT[0, :4] = labels_BT[2, 9] = IGNORED_LABEL
    return h_BTD, kernel_DV, labels_BT


def oracle(h_BTD, kernel_DV, labels_BT):
    """Return the sum, its number of terms, and its gradients, in float64."""
    logits_BTV = h_BTD @ kernel_DV
    probabilities_BTV = np.exp(logits_BTV) / np.exp(logits_BTV).sum(axis=-1, keepdims=True)
    valid_BT = labels_BT >= 0
    one_hot_BTV = np.eye(V)[np.maximum(labels_BT, 0)]
    nll_BT = -np.log((probabilities_BTV * one_hot_BTV).sum(axis=-1))
    d_logits_BTV = (probabilities_BTV - one_hot_BTV) * valid_BT[..., None]
    d_h_BTD = d_logits_BTV @ kernel_DV.T
    d_kernel_DV = np.einsum("btd,btv->dv", h_BTD, d_logits_BTV)
    return (nll_BT * valid_BT).sum(), valid_BT.sum(), d_h_BTD, d_kernel_DV


def as_float32(inputs):
    h_BTD, kernel_DV, labels_BT = inputs
    return jnp.asarray(h_BTD, jnp.float32), jnp.asarray(kernel_DV, jnp.float32), jnp.asarray(labels_BT, jnp.int32)


# The normaliser takes one pass over the logits on a GPU, two on the CPU.
PASSES = pytest.mark.parametrize("one_pass", [False, True], ids=["two_passes", "one_pass"])


@PASSES
@pytest.mark.parametrize("chunk_tokens", [None, 1, 9, 10**6])
def test_sum_count_and_gradients_match_the_softmax_for_every_chunk_size(inputs, chunk_tokens, one_pass):
    def scaled(h_BTD, kernel_DV, labels_BT):
        nll_sum, num_tokens = token_nll(h_BTD, kernel_DV, labels_BT, chunk_tokens=chunk_tokens, one_pass=one_pass)
        return 3.0 * nll_sum, (nll_sum, num_tokens)

    value_and_grad = jax.jit(jax.value_and_grad(scaled, argnums=(0, 1), has_aux=True))
    (_, (nll_sum, num_tokens)), (d_h_BTD, d_kernel_DV) = value_and_grad(*as_float32(inputs))
    expected_sum, expected_tokens, expected_d_h_BTD, expected_d_kernel_DV = oracle(*inputs)
    assert nll_sum.dtype == num_tokens.dtype == jnp.float32
    assert num_tokens == expected_tokens
    np.testing.assert_allclose(nll_sum, expected_sum, rtol=1e-6)
    np.testing.assert_allclose(d_h_BTD, 3 * expected_d_h_BTD, atol=1e-5)
    np.testing.assert_allclose(d_kernel_DV, 3 * expected_d_kernel_DV, atol=2e-5)


@PASSES
@pytest.mark.parametrize("vocab_multiple", [8, 64])
def test_zero_columns_after_the_vocabulary_change_nothing(inputs, vocab_multiple, one_pass):
    options = {"chunk_tokens": 9, "vocab_multiple": vocab_multiple, "one_pass": one_pass}

    def padded(h_BTD, kernel_DV, labels_BT):
        return token_nll(h_BTD, kernel_DV, labels_BT, **options)[0]

    value, (d_h_BTD, d_kernel_DV) = jax.jit(jax.value_and_grad(padded, argnums=(0, 1)))(*as_float32(inputs))
    expected_sum, _, expected_d_h_BTD, expected_d_kernel_DV = oracle(*inputs)
    np.testing.assert_allclose(jax.jit(padded)(*as_float32(inputs)), expected_sum, rtol=1e-6)
    np.testing.assert_allclose(value, expected_sum, rtol=1e-6)
    np.testing.assert_allclose(d_h_BTD, expected_d_h_BTD, atol=1e-5)
    np.testing.assert_allclose(d_kernel_DV, expected_d_kernel_DV, atol=2e-5)


@PASSES
@pytest.mark.parametrize(("num_shards", "vocab_multiple"), [(2, 1), (4, 8)])
def test_a_column_sharded_kernel_has_the_loss_and_the_gradients_of_the_whole(
    inputs, num_shards, vocab_multiple, one_pass
):
    """Cover `weight_B`, chunks, and padding columns that belong to no token."""
    h_BTD, kernel_DV, labels_BT = as_float32(inputs)
    padding = -V % num_shards
    padded_DV = jnp.pad(kernel_DV, ((0, 0), (0, padding)), constant_values=9.0)  # would change the loss if they counted

    def of_shard(h_BTD, kernel_DV, labels_BT):
        def objective(h_BTD, kernel_DV):
            sums = token_nll(
                h_BTD,
                kernel_DV,
                labels_BT,
                jnp.full(B, 3.0),
                chunk_tokens=9,
                vocab_multiple=vocab_multiple,
                vocab_size=V,
                axis_name="shard",
                one_pass=one_pass,
            )
            return sums[0] / num_shards, jnp.stack(sums)  # the gradient is that of the sum over shards

        (d_h_BTD, d_kernel_DV), sums = jax.grad(objective, argnums=(0, 1), has_aux=True)(h_BTD, kernel_DV)
        return sums[None], jax.lax.psum(d_h_BTD, "shard"), d_kernel_DV

    mesh = jax.make_mesh((num_shards,), ("shard",), (AxisType.Auto,), devices=jax.devices()[:num_shards])
    sharded = jax.shard_map(
        of_shard,
        mesh=mesh,
        in_specs=(P(), P(None, "shard"), P()),
        out_specs=(P("shard"), P(), P(None, "shard")),
        check_vma=False,
    )
    sums, d_h_BTD, d_kernel_DV = jax.jit(sharded)(h_BTD, padded_DV, labels_BT)
    expected_sum, expected_tokens, expected_d_h_BTD, expected_d_kernel_DV = oracle(*inputs)
    np.testing.assert_allclose(sums[:, 0], np.full(num_shards, 3 * expected_sum), rtol=1e-6)
    np.testing.assert_array_equal(sums[:, 1], np.full(num_shards, expected_tokens))
    np.testing.assert_allclose(d_h_BTD, 3 * expected_d_h_BTD, atol=1e-5)
    np.testing.assert_allclose(d_kernel_DV[:, :V], 3 * expected_d_kernel_DV, atol=2e-5)
    np.testing.assert_array_equal(d_kernel_DV[:, V:], 0.0)


@PASSES
def test_logits_of_a_vocabulary_sharded_by_the_partitioner_are_never_gathered(one_pass):
    vocab_size, num_shards = 40, 4
    mesh = jax.make_mesh((num_shards,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:num_shards])
    whole, columns = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "tensor"))

    def nll_sum(h_BTD, kernel_DV, labels_BT):
        return token_nll(h_BTD, kernel_DV, labels_BT, chunk_tokens=6, one_pass=one_pass)[0]

    shapes = ((B, T, D), jnp.float32, whole), ((D, vocab_size), jnp.float32, columns), ((B, T), jnp.int32, whole)
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype, sharding in shapes]
    text = jax.jit(jax.grad(nll_sum, argnums=(0, 1))).lower(*arguments).compile().as_text() or ""
    logits = [int(width) for width in re.findall(rf"f32\[{B},2,(\d+)\]", text)]
    assert vocab_size // num_shards in logits and vocab_size not in logits


@pytest.mark.parametrize("differentiated", [False, True], ids=["value", "gradient"])
def test_no_array_is_larger_than_a_chunks_logits(inputs, differentiated):
    def nll_sum(h_BTD, kernel_DV, labels_BT):
        return token_nll(h_BTD, kernel_DV, labels_BT, chunk_tokens=6)[0]

    fn = jax.grad(nll_sum, argnums=(0, 1)) if differentiated else nll_sum
    text = str(jax.make_jaxpr(fn)(*as_float32(inputs)))
    assert f"[{B},2,{V}]" in text and f"[{B},{T},{V}]" not in text


def test_bfloat16_kernel_gradients_are_summed_over_chunks_in_float32():
    # 512 chunks each add the same small amount: a bfloat16 sum would stop growing at 256 of them.
    h_BTD = jnp.ones((1, 512, 1), jnp.bfloat16)
    labels_BT = jnp.zeros((1, 512), jnp.int32)
    grad = jax.grad(lambda kernel_DV: token_nll(h_BTD, kernel_DV, labels_BT, chunk_tokens=1)[0])
    np.testing.assert_allclose(grad(jnp.zeros((1, 2), jnp.float32)), [[-256.0, 256.0]], rtol=1e-6)


@PASSES
def test_large_logits_do_not_overflow(one_pass):
    h_BTD = jnp.full((1, 2, 1), 1e4, jnp.float32)
    nll_sum, _ = token_nll(h_BTD, jnp.array([[1.0, -1.0]]), jnp.array([[0, 1]]), one_pass=one_pass)
    np.testing.assert_allclose(nll_sum, 2e4)


def test_a_batch_without_labels_has_loss_and_gradient_zero(of_nine_tokens):
    ids_BT = np.zeros((2, 4), np.int32)
    (value, num_tokens), grads = of_nine_tokens({"input_ids": ids_BT, "labels": np.full_like(ids_BT, IGNORED_LABEL)})
    assert value == 0 and num_tokens == 0
    jax.tree.map(functools.partial(np.testing.assert_array_equal, 0.0), grads)


@functools.cache
def with_columns_of_no_token(one_pass):
    """Return the loss of a kernel with three more columns: alone, and with its gradient."""

    def nll_sum(h_BTD, kernel_DV, labels_BT, weight_B):
        padded_DV = jnp.pad(kernel_DV, ((0, 0), (0, 3)))
        options = {"chunk_tokens": 9, "vocab_size": V, "one_pass": one_pass}
        return token_nll(h_BTD, padded_DV, labels_BT, weight_B, **options)[0]

    return jax.jit(nll_sum), jax.jit(jax.value_and_grad(nll_sum, argnums=(0, 1)))


@PASSES
@pytest.mark.parametrize("label", [-1, V, 2**31 - 1, -(2**31)])
def test_a_label_that_is_no_token_makes_loss_and_gradient_nan(inputs, label, one_pass):
    arguments = [np.asarray(x) for x in as_float32(inputs)]
    arguments[2] = arguments[2].copy()
    arguments[2][1, 3] = label
    value_of, gradient_of = with_columns_of_no_token(one_pass)
    for weight_B in (None, np.zeros(B, np.float32)):  # for any weight of the sequence
        value, (d_h_BTD, d_kernel_DV) = jax.tree.map(np.asarray, gradient_of(*arguments, weight_B))
        assert np.isnan(value_of(*arguments, weight_B)) and np.isnan(value)
        assert np.isnan(d_h_BTD[1, 3]).all() and not np.isnan(d_h_BTD[0]).any()
        assert np.isnan(d_kernel_DV).any(axis=0).all()


@pytest.fixture(scope="module")
def of_nine_tokens():
    """Return a function from a batch to the loss, its number of labels, and the gradient of a Llama of nine tokens."""
    config = ModelConfig(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=2, vocab_size=9)
    value_and_grad = jax.jit(jax.value_and_grad(functools.partial(loss, config), has_aux=True))
    params = random_params(config)
    return lambda batch: jax.tree.map(np.asarray, value_and_grad(params, batch))


@pytest.mark.parametrize("token", [-1, 9, -(2**31), 2**31 - 1])
def test_a_token_outside_the_vocabulary_makes_loss_and_gradient_nan(of_nine_tokens, token):
    ids_BT = np.arange(8, dtype=np.int32).reshape(2, 4)
    batch = {"input_ids": ids_BT, "labels": ids_BT + 1}
    (value, _), _ = of_nine_tokens(batch)
    assert np.isfinite(value)
    for name in batch:
        changed_BT = batch[name].copy()
        changed_BT[1, 2] = token
        (value, _), grads = of_nine_tokens(batch | {name: changed_BT})
        assert np.isnan(value), name
        assert all(np.isnan(leaf).any() for leaf in jax.tree.leaves(grads)), name
