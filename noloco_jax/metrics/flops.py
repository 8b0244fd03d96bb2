"""Floating-point operations of training, and model FLOP utilization (MFU)."""

import math

import jax

from noloco_jax.config import ModelConfig, TrainConfig
from noloco_jax.model.kind import kind_of, muons, param_shapes
from noloco_jax.spmd.muon import NEWTON_SCHULZ_STEPS


def model_flops_per_token(config: TrainConfig) -> float:
    """Count the floating-point operations of training on one token that the model needs, not those executed.

    The backward pass takes twice the forward one (`Model.forward_flops`). Recomputation (remat) is not counted.
    """
    return 3.0 * kind_of(config.model).forward_flops(config.model, config.data.sequence_length)


def newton_schulz_flops(model: ModelConfig) -> float:
    """Count the floating-point operations by which Muon orthogonalizes a replica's matrices in a step.

    For an M x N matrix, M <= N, an iteration takes 2M²N for x xᵀ, 2M³ for its square and 2M²N for the product with x.
    """
    of_muon, products = muons(model), 0
    for path, x in jax.tree.leaves_with_path(param_shapes(model)):
        if tuple(key.key for key in path) in of_muon:
            *layers, fan_in, fan_out = x.shape
            small, large = sorted((fan_in, fan_out))
            products += math.prod(layers) * small**2 * (4 * large + 2 * small)
    return float(NEWTON_SCHULZ_STEPS * products)


def mfu(tokens_per_second: float, flops_per_token: float, peak_flops_per_second: float) -> float:
    """Return the model FLOP utilization: the share (0 to 1) of the devices' peak rate that the model's FLOPs use."""
    return tokens_per_second * flops_per_token / peak_flops_per_second
