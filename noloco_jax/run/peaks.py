"""The peak rate of devices in matrix products, as their makers publish it, to compare a run's with (its MFU)."""

from typing import Any, NamedTuple

import jax


class Peak(NamedTuple):
    """The most of a device.

    Attributes:
      flops_per_second: of products in a run's precision, without sparsity.
      source: where that stands.
    """

    flops_per_second: float
    source: str


# Of bfloat16 products with float32 sums, dense, in TFLOP/s. Data sheets that give rates with 2:4 sparsity are halved.
# The first entry whose words are all in the device's name holds.
_TFLOPS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("GB200",), 2500.0),
    (("B200",), 2250.0),
    (("H200", "NVL"), 835.5),
    (("H200",), 989.5),
    (("GH200",), 989.5),
    (("H100", "PCIe"), 756.5),
    (("H100", "NVL"), 835.5),
    (("H100",), 989.5),
    (("A100",), 312.0),
    (("L40S",), 362.0),
    (("L4",), 121.0),
)
_TF32_SHARE = 0.5  # TF32's rate of bfloat16's, on all of these


def peak_of(device_kind: str, dtype: str) -> Peak | None:
    """The peak of a device by its name; None of one that is not listed, as of every CPU.

    Args:
      device_kind: `device.device_kind`, such as "NVIDIA H100 80GB HBM3".
      dtype: in which the model computes. GPUs multiply float32 in TF32 unless JAX is told otherwise, and then there is
        no peak here.
    """
    settings: Any = jax.config  # makes its attributes where no type checker sees them
    words = device_kind.replace("-", " ").split()
    for names, tflops in _TFLOPS:
        if all(name in words for name in names):
            if dtype == "bfloat16":
                return Peak(1e12 * tflops, f"NVIDIA's data sheet of the {' '.join(names)}, bfloat16 without sparsity")
            if settings.jax_default_matmul_precision in (None, "default", "tensorfloat32"):
                share = 1e12 * tflops * _TF32_SHARE
                return Peak(share, f"NVIDIA's data sheet of the {' '.join(names)}, TF32 without sparsity")
    return None
