"""Bytes that replicas send in outer steps, against a manual count.

`tests/communication/test_compiled_text.py` compares them with the collectives of compiled programs.
"""

import math
from typing import Any

import pytest

from noloco_jax.config import TrainConfig, from_dict
from noloco_jax.train.bytes_sent import BytesSent, bytes_sent_of, num_outer_steps, num_pairings

V, D, F = 259, 16, 32
LAYER = D * (16 + 8 + 8 + 16) + 3 * D * F + 2 * D  # attention's q, k, v, o, the MLP's three, two norms
PARAMETERS = 2 * V * D + LAYER + D
ONE_DEVICE = {"replica": 1, "stage": 1, "fsdp": 1, "tensor": 1}


def run(method: str, num_replicas: int = 4, **outer) -> TrainConfig:
    model = {"hidden_size": D, "intermediate_size": F, "num_heads": 2, "num_kv_heads": 1}
    return from_dict(
        {
            "method": method,
            "num_replicas": num_replicas,
            "num_steps": 42,
            "model": model | {"num_layers": 1},
            "outer": {"sync_every": 4} | outer,
            "data": {"batch_size": 4, "sequence_length": 8},
        }
    )


def messages(method: str, *arguments: Any, **outer) -> BytesSent:
    return bytes_sent_of(run(method, *arguments, **outer), ONE_DEVICE)


def test_bytes_of_a_group_are_halves_or_a_message_to_each_other_and_scale_with_the_wire_width():
    assert messages("noloco", group_size=4).outer_step == 1.5 * 4 * PARAMETERS
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
    if wire != "int8":  # halves of arrays with an odd number of blocks are padded, and windows precede a whole message
        found = messages("noloco", wire=wire, group_size=4).outer_step
        assert 1.5 * message <= found <= 1.5 * 1.06 * message
    if wire != "modulo4":  # a message is cut into equal parts, of whole blocks, for each of four replicas
        parts = math.ceil(full / 4) * (64 * bits // 8 + beside) + math.ceil(small / 4) * (16 * bits // 8 + beside)
        assert messages("diloco", wire=wire).outer_step == 2 * 3 * parts


def test_the_unpaired_one_of_an_odd_number_of_replicas_sends_nothing():
    found = messages("noloco", 5)
    assert found.outer_step == 4 / 5 * 4 * PARAMETERS


def test_epidemic_sends_whole_messages_to_each_of_its_neighbours():
    assert messages("epidemic").outer_step == 2 * 4 * PARAMETERS
    assert messages("epidemic", neighbours=3, wire="bfloat16").outer_step == 3 * 2 * PARAMETERS


@pytest.mark.parametrize(
    ("method", "outer_steps", "pairings"),
    [("noloco", 10, 3), ("epidemic", 10, 3), ("diloco", 10, 0), ("sparseloco", 10, 0), ("ddp", 0, 0), ("local", 0, 0)],
)
def test_outer_steps_and_pairings_are_counted_for_methods_that_have_them(method, outer_steps, pairings):
    """Every pair of four replicas meets in one of three pairings; one of graphs is two of the three shifts."""
    assert (num_outer_steps(run(method)), num_pairings(run(method))) == (outer_steps, pairings)
