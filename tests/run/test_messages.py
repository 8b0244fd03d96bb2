"""What replicas send, against a count by hand."""

import math

import pytest

from noloco_jax.config import TrainConfig, from_dict
from noloco_jax.run.messages import bytes_sent, num_outer_steps, num_pairings, total_bytes_sent

# Embedding and head, attention's q, k, v, o, the MLP's three, three norms.
PARAMETERS = 2 * 259 * 16 + 16 * (16 + 8 + 8 + 16) + 3 * 16 * 32 + 3 * 16
RING = 4 * PARAMETERS * 3 // 2  # all but one of four parts, twice


def run(method: str, **outer) -> TrainConfig:
    return from_dict(
        {
            "method": method,
            "num_replicas": 4,
            "num_steps": 42,
            "model": {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1},
            "outer": {"sync_every": 4} | outer,
        }
    )


@pytest.mark.parametrize(
    ("method", "each", "times"),
    [("noloco", 4 * PARAMETERS, 10), ("diloco", RING, 10), ("ddp", RING, 42), ("local", 0, 0)],
)
def test_bytes_sent_are_of_messages_of_the_parameters_size(method, each, times):
    config = run(method)
    assert bytes_sent(config) == each
    assert total_bytes_sent(config) == times * each
    assert num_outer_steps(config) == (10 if method in ("noloco", "diloco") else 0)


def test_a_group_of_four_sends_what_a_ring_does_one_that_leaves_a_rest_all_to_all_and_half_the_width_half_the_bytes():
    assert bytes_sent(run("noloco", group_size=4)) == RING
    assert bytes_sent(run("noloco", group_size=3)) == 2 * 4 * PARAMETERS
    assert bytes_sent(run("noloco", wire="bfloat16")) == 2 * PARAMETERS


@pytest.mark.parametrize(("wire", "block_bytes"), [("int8", 2 + 64), ("int6", 2 + 48), ("int4", 2 + 32)])
def test_a_message_in_blocks_counts_scales_and_what_fills_the_last_block_of_every_array(wire, block_bytes):
    sizes = [259 * 16, 259 * 16, 16 * 16, 16 * 8, 16 * 8, 16 * 16, *[16 * 32] * 3, 16, 16, 16]
    assert sum(sizes) == PARAMETERS
    blocks = sum(math.ceil(size / 64) for size in sizes)
    assert bytes_sent(run("noloco", wire=wire)) == blocks * block_bytes
    # A group of four sends everything to everyone: codes of all are shorter than a quarter's mean in float32.
    assert bytes_sent(run("noloco", wire=wire, group_size=4)) == 3 * blocks * block_bytes


def test_epidemic_sends_whole_messages_to_each_of_its_neighbours():
    assert bytes_sent(run("epidemic")) == 2 * 4 * PARAMETERS
    assert bytes_sent(run("epidemic", neighbours=3, wire="bfloat16")) == 3 * 2 * PARAMETERS
    assert num_pairings(run("epidemic")) == 3  # two of the three shifts


def test_sparseloco_sends_14_bits_of_an_entry_and_four_bytes_a_chunk_to_all_others():
    # Of 259 * 16 weights, two chunks.
    sizes = [2 * 4096, 2 * 4096, 256, 128, 128, 256, *[512] * 3, 16, 16, 16]

    def bytes_of(size: int) -> int:
        chunk = min(4096, size)
        kept = max(4, 4 * math.ceil(chunk / 64 / 4))
        return size // chunk * (4 + kept * ((8 if chunk <= 256 else 12) + 2) // 8)

    assert bytes_sent(run("sparseloco")) == 3 * sum(map(bytes_of, sizes))
    assert num_outer_steps(run("sparseloco")) == 10


def test_every_pair_of_four_replicas_meets_in_one_of_three_pairings():
    assert [num_pairings(run(method)) for method in ("noloco", "diloco", "ddp", "local")] == [3, 0, 0, 0]
