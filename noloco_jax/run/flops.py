"""Floating-point operations of training, and model FLOP utilization (MFU)."""

from noloco_jax.config import ModelConfig, TrainConfig
from noloco_jax.model.llama import param_shapes
from noloco_jax.spmd.muon import NEWTON_SCHULZ_STEPS


def model_flops_per_token(config: TrainConfig) -> float:
    """Count the floating-point operations of training on one token that the model needs, not those executed.

    Forward, per token: 2 per weight of a matrix multiplication (attention's q, k, v and o, the MLP's three, the head;
    the embedding is a lookup and counts nothing), and causal attention once, with half of the T x T scores:
    2 products (scores, values) x 2 x T/2 x heads x head size per layer. The backward pass takes twice the forward one,
    so the sum is three times that. Recomputation (remat) is not counted. A document mask changes nothing: the masked
    scores are counted, so that runs with and without it are comparable.
    """
    model, length = config.model, config.data.sequence_length
    head_size = model.hidden_size // model.num_heads
    queries, keys = model.num_heads * head_size, model.num_kv_heads * head_size
    layer = model.hidden_size * (2 * queries + 2 * keys + 3 * model.intermediate_size)
    weights = model.num_layers * layer + model.hidden_size * model.vocab_size
    attention = model.num_layers * 2 * length * queries
    return 3.0 * (2 * weights + attention)


def newton_schulz_flops(model: ModelConfig) -> float:
    """Count the floating-point operations by which Muon orthogonalizes a replica's matrices in a step.

    For an M x N matrix, M <= N, an iteration takes 2M²N for x xᵀ, 2M³ for its square and 2M²N for the product with x.
    """
    stacks = (x.shape for x in param_shapes(model)["blocks"].values() if len(x.shape) == 3)
    products = sum(layers * min(sides) ** 2 * (4 * max(sides) + 2 * min(sides)) for layers, *sides in stacks)
    return float(NEWTON_SCHULZ_STEPS * products)


def mfu(tokens_per_second: float, flops_per_token: float, peak_flops_per_second: float) -> float:
    """Return the model FLOP utilization: the share (0 to 1) of the devices' peak rate that the model's FLOPs use."""
    return tokens_per_second * flops_per_token / peak_flops_per_second
