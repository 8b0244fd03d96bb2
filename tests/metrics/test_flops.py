"""The FLOP count, against a count per matrix product, and peaks of devices, against the vendors' data sheets."""

import jax
import pytest

from noloco_jax.config import TrainConfig, from_dict
from noloco_jax.metrics.peaks import mfu, model_flops_per_token, peak_of


def matmul_flops(config: TrainConfig) -> float:
    """Count FLOPs per token by matrix product over one sequence: 2mkn for m x k by k x n, half for causal scores."""
    model, length = config.model, config.data.sequence_length
    width = model.head_dim or model.hidden_size // model.num_heads
    window = min(model.sliding_window or length, length)
    # Pairs below the diagonal, counted as half a square, minus the pairs outside the sliding window.
    pairs = length**2 / 2 - (length - window) ** 2 / 2
    products = []
    for _ in range(model.num_layers):
        products += [
            (length, model.hidden_size, heads * width) for heads in (model.num_heads, *[model.num_kv_heads] * 2)
        ]
        products += [(length, model.num_heads * width, model.hidden_size)]
        products += [(length, model.hidden_size, model.intermediate_size)] * 2
        products += [(length, model.intermediate_size, model.hidden_size)]
        products += [(length, width, pairs / length), (length, pairs / length, width)] * model.num_heads
    products += [(length, model.hidden_size, model.vocab_size)]
    return 3 * sum(2 * m * k * n for m, k, n in products) / length


@pytest.mark.parametrize(
    "fields",
    [
        {"num_kv_heads": 1},
        {"num_kv_heads": 2},
        {"num_kv_heads": 4},
        {"head_dim": 96, "qk_norm": True, "qkv_bias": True},
        {"sliding_window": 40},
        {"sliding_window": 500},
    ],
    ids=str,
)
def test_model_flops_match_a_count_per_matrix_product(fields):
    config = from_dict(
        {
            "model": {"num_layers": 3, "intermediate_size": 768, "vocab_size": 1000, **fields},
            "data": {"sequence_length": 128},
        }
    )
    assert model_flops_per_token(config.model, 128) == pytest.approx(matmul_flops(config), rel=1e-12)


def test_a_tied_head_costs_what_an_untied_one_does():
    tied = from_dict({"model": {"tie_embeddings": True}})
    assert model_flops_per_token(tied.model, 256) == model_flops_per_token(TrainConfig().model, 256)


def test_mfu_is_the_fraction_of_the_peak():
    assert mfu(tokens_per_second=1e3, flops_per_token=2e9, peak_flops_per_second=4e12) == 0.5


@pytest.mark.parametrize(
    ("device_kind", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA L4", 121),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_its_device_kind(device_kind, tflops):
    peak = peak_of(device_kind, "bfloat16")
    assert peak is not None and peak.flops_per_second == tflops * 1e12
    half = peak_of(device_kind, "float32")
    assert half is not None and half.flops_per_second == tflops * 1e12 / 2 and "TF32" in half.source


@pytest.mark.parametrize(
    ("device_kind", "tflops"),  # names as in JAX's topologies
    [("TPU v4", 275), ("TPU v5 lite", 197), ("TPU v5", 459), ("TPU v6 lite", 918), ("TPU7x", 2307 / 2)],
)
def test_the_float32_peak_of_a_tpu_is_that_of_bfloat16_at_default_precision(device_kind, tflops):
    for dtype in ("bfloat16", "float32"):
        peak = peak_of(device_kind, dtype)
        assert peak is not None and peak.flops_per_second == tflops * 1e12
    with jax.default_matmul_precision("highest"):
        assert peak_of(device_kind, "float32") is None


@pytest.mark.parametrize("device_kind", ["cpu", "TPU v3", "NVIDIA L40", "GeForce RTX 4090", "Tesla V100-SXM2-16GB", ""])
def test_an_unlisted_device_has_no_peak(device_kind):
    assert peak_of(device_kind, "bfloat16") is None


def test_float32_at_full_precision_has_no_peak():
    with jax.default_matmul_precision("highest"):
        assert peak_of("NVIDIA H100 80GB HBM3", "float32") is None
        assert peak_of("NVIDIA H100 80GB HBM3", "bfloat16") is not None
