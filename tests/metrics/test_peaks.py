"""Peak FLOP/s of devices by JAX's device_kind, against the vendors' data sheets."""

import jax
import pytest

from noloco_jax.metrics.peaks import peak_of


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
