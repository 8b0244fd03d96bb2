"""The FLOP count, against a count per matrix product."""

import pytest

from noloco_jax.config import TrainConfig, from_dict
from noloco_jax.metrics.flops import mfu, model_flops_per_token


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
    assert model_flops_per_token(config) == pytest.approx(matmul_flops(config), rel=1e-12)


def test_a_tied_head_costs_what_an_untied_one_does():
    tied = from_dict({"model": {"tie_embeddings": True}})
    assert model_flops_per_token(tied) == model_flops_per_token(TrainConfig())


def test_mfu_is_the_fraction_of_the_peak():
    assert mfu(tokens_per_second=1e3, flops_per_token=2e9, peak_flops_per_second=4e12) == 0.5
