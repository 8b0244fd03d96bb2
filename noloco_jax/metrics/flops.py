"""Floating-point operations of training, and model FLOP utilization (MFU)."""

from noloco_jax.config import TrainConfig
from noloco_jax.model.kind import kind_of


def model_flops_per_token(config: TrainConfig) -> float:
    """Count the floating-point operations of training on one token that the model needs, not those executed.

    The backward pass takes twice the forward one (`Model.forward_flops`). Recomputation (remat) and Muon's iterations
    are not counted.
    """
    return 3.0 * kind_of(config.model).forward_flops(config.model, config.data.sequence_length)


def mfu(tokens_per_second: float, flops_per_token: float, peak_flops_per_second: float) -> float:
    """Return the model FLOP utilization: the share (0 to 1) of the devices' peak rate that the model's FLOPs use."""
    return tokens_per_second * flops_per_token / peak_flops_per_second
