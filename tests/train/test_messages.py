"""Bytes that replicas send, against a manual count, and for routed micro-batches against a walk along the routes.

`tests/communication/test_compiled_text.py` compares them with the collectives of compiled programs.
"""

import math
from typing import Any

import numpy as np
import pytest

from noloco_jax.config import TrainConfig, from_dict
from noloco_jax.spmd.pipeline.routes import route_pool
from noloco_jax.train.messages import Messages, messages_of, num_outer_steps, num_pairings

V, D, F = 259, 16, 32
LAYER = D * (16 + 8 + 8 + 16) + 3 * D * F + 2 * D  # attention's q, k, v, o, the MLP's three, two norms
PARAMETERS = 2 * V * D + LAYER + D
RING = 4 * PARAMETERS * 3 // 2  # a ring all-reduce of four sends three of four parts, twice
ONE_DEVICE = {"replica": 1, "stage": 1, "fsdp": 1, "tensor": 1}


def run(method: str, num_replicas: int = 4, mesh: dict[str, Any] | None = None, **outer) -> TrainConfig:
    model = {"hidden_size": D, "intermediate_size": F, "num_heads": 2, "num_kv_heads": 1}
    return from_dict(
        {
            "method": method,
            "num_replicas": num_replicas,
            "num_steps": 42,
            "num_microbatches": 2,
            "model": model | {"num_layers": (mesh or {}).get("stage", 1)},
            "outer": {"sync_every": 4} | outer,
            "data": {"batch_size": 4, "sequence_length": 8},
            "mesh": mesh or {},
        }
    )


def messages(method: str, *arguments: Any, **outer) -> Messages:
    return messages_of(run(method, *arguments, **outer), ONE_DEVICE)


@pytest.mark.parametrize(
    ("method", "in_outer_step", "in_inner_step"),
    [("noloco", 4 * PARAMETERS, 0), ("diloco", RING, 0), ("ddp", 0, RING + 6), ("local", 0, 0)],
)
def test_bytes_sent_follow_from_the_number_of_parameters(method, in_outer_step, in_inner_step):
    found = messages(method)
    assert (found.outer_step, found.inner_step) == (in_outer_step, in_inner_step)


def test_outer_steps_are_counted_for_methods_that_have_them():
    assert [num_outer_steps(run(method)) for method in ("noloco", "diloco", "ddp", "local")] == [10, 10, 0, 0]


def test_bytes_of_a_group_are_a_message_to_each_other_and_scale_with_the_wire_width():
    assert messages("noloco", group_size=4).outer_step == 3 * 4 * PARAMETERS
    # Three replicas send everything to two others each, and the fourth is unpaired.
    assert messages("noloco", group_size=3).outer_step == 3 * 2 * 4 * PARAMETERS / 4
    assert messages("noloco", wire="bfloat16").outer_step == 2 * PARAMETERS


@pytest.mark.parametrize(("wire", "bits", "beside"), [("int8", 8, 2), ("int4", 4, 2), ("modulo4", 4, 2)])
def test_a_block_quantized_message_counts_block_scales_and_padding(wire, bits, beside):
    """Rows have 16 elements: embedding tables and MLP matrices (32 units) form blocks of 64, others blocks of 16."""
    full = 2 * math.ceil(V / 4) + 3 * F // 4
    small = 16 + 8 + 8 + 16 + 3  # attention's q, k, v, o, and the norms
    message = full * (64 * bits // 8 + beside) + small * (16 * bits // 8 + beside)
    assert messages("noloco", wire=wire).outer_step == message
    if wire == "int4":
        assert messages("noloco", wire=wire, group_size=4).outer_step == 3 * message
    if wire != "modulo4":  # a message is cut into equal parts, of whole blocks, for each of four replicas
        parts = math.ceil(full / 4) * (64 * bits // 8 + beside) + math.ceil(small / 4) * (16 * bits // 8 + beside)
        assert messages("diloco", wire=wire).outer_step == 2 * 3 * parts


def test_the_unpaired_one_of_an_odd_number_of_replicas_sends_nothing():
    found = messages("noloco", 5)
    assert found.outer_step == 4 / 5 * 4 * PARAMETERS


def test_messages_of_stages_include_vocabulary_padding_and_a_final_norm_each():
    stages = 2
    weights = 2 * (V + 13) * D + stages * LAYER + stages * D  # padded to a multiple of 8 tokens per stage
    found = messages("noloco", 4, {"stage": stages, "routing": "fixed"})
    assert found.outer_step == 4 * weights
    assert found.inner_step == 0
    assert messages("diloco", 4, {"stage": stages}).outer_step == 4 * weights * 3 / 2


@pytest.mark.parametrize(("num_replicas", "stages"), [(5, 2), (4, 3)])
def test_bytes_of_routed_micro_batches_match_a_walk_along_the_routes(num_replicas, stages):
    """At every tick each stage but the last sends states, labels and a weight, and receives the states' gradient."""
    config = run("noloco", num_replicas, {"stage": stages})
    sequences, length, ticks = 4 // 2, 8, 2 + stages - 1
    message = 2 * 4 * sequences * length * D + 4 * sequences * length + 4
    distinct = np.unique(route_pool(num_replicas, stages, config.seed, "random"), axis=0)
    others = (distinct != np.arange(num_replicas)).sum(axis=(1, 2)).mean()
    sent = messages_of(config, ONE_DEVICE).inner_step
    assert sent == pytest.approx(ticks * others * message / num_replicas, rel=1e-12)


def test_epidemic_sends_whole_messages_to_each_of_its_neighbours():
    assert messages("epidemic").outer_step == 2 * 4 * PARAMETERS
    assert messages("epidemic", neighbours=3, wire="bfloat16").outer_step == 3 * 2 * PARAMETERS
    assert num_pairings(run("epidemic")) == 3  # each pairing is two of the three shifts


def test_sparseloco_sends_its_entries_and_four_bytes_a_chunk_to_all_others():
    """Tables and MLP matrices form chunks of 128 elements, others chunks of 16; four entries of 10 bits a chunk."""
    chunks = 2 * math.ceil(V / 8) + 3 * F // 8 + 16 + 8 + 8 + 16 + 3
    assert messages("sparseloco").outer_step == 3 * chunks * (4 + 4 * 10 // 8)
    assert num_outer_steps(run("sparseloco")) == 10


def test_every_pair_of_four_replicas_meets_in_one_of_three_pairings():
    assert [num_pairings(run(method)) for method in ("noloco", "diloco", "ddp", "local")] == [3, 0, 0, 0]
