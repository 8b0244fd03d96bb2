"""Model FLOP utilization (MFU): floating-point operations of training, and published peak rates of devices."""

from typing import Any, NamedTuple

import jax

from noloco_jax.config import ModelConfig
from noloco_jax.model.architecture import architecture_of


class Peak(NamedTuple):
    """Peak rate of a device.

    Attributes:
      flops_per_second: rate of matrix products in a run's precision, without sparsity.
      source: origin of the figure.
    """

    flops_per_second: float
    source: str


# TFLOP/s of dense bfloat16 products with float32 sums. Rates that data sheets give with 2:4 sparsity are halved. The
# first entry whose words are all in the device's name applies.
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
    (("TPU7x",), 1153.5),  # a chip of 2,307 is two devices
    (("TPU", "v6"), 918.0),  # v6e
    (("TPU", "v5", "lite"), 197.0),  # v5e
    (("TPU", "v5"), 459.0),  # v5p
    (("TPU", "v4"), 275.0),
)
_TF32_SHARE = 0.5  # ratio of the TF32 rate to the bfloat16 rate, on all of these GPUs


def peak_of(device_kind: str, dtype: str) -> Peak | None:
    """Look up the peak of a device by its name; None for one that is not listed, like every CPU.

    Args:
      device_kind: `device.device_kind`, such as "NVIDIA H100 80GB HBM3".
      dtype: dtype in which the model computes. For float32 the peak is that of TF32, which GPUs use by default; with
        another matmul precision there is none. TPUs round the factors to bfloat16 by default.
    """
    settings: Any = jax.config  # its attributes are made at run time, where no type checker sees them
    words = device_kind.replace("-", " ").split()
    precision = settings.jax_default_matmul_precision
    found = next((row for row in _TFLOPS if all(name in words for name in row[0])), None)
    if found is None:
        return None
    names, tflops = found
    name, is_tpu = " ".join(names), names[0].startswith("TPU")
    source = f"Google's page on the {name}, bfloat16" if is_tpu else f"NVIDIA's data sheet of the {name}"
    if dtype == "bfloat16" or (is_tpu and precision in (None, "default")):
        return Peak(1e12 * tflops, source if is_tpu else f"{source}, bfloat16 without sparsity")
    if not is_tpu and precision in (None, "default", "tensorfloat32"):
        return Peak(1e12 * tflops * _TF32_SHARE, f"{source}, TF32 without sparsity")
    return None


def model_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Count the floating-point operations of training on one token that the model needs, not those executed.

    The backward pass takes twice the forward one (`Model.forward_flops`). Recomputation (remat) and Muon's iterations
    are not counted.
    """
    return 3.0 * architecture_of(model).forward_flops(model, sequence_length)


def mfu(tokens_per_second: float, flops_per_token: float, peak_flops_per_second: float) -> float:
    """Return the model FLOP utilization: the share (0 to 1) of the devices' peak rate that the model's FLOPs use."""
    return tokens_per_second * flops_per_token / peak_flops_per_second
