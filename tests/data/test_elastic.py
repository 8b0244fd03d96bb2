"""Redistributed positions: after any change of the number of replicas, each token is read once in an epoch."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from noloco_jax.data import redistribute
from noloco_jax.data.positions import start_position
from noloco_jax.errors import UserError
from support.data_makers import (
    before_next_document,
    documents,
    open_streams,
    read_through,
    write_counting,
    write_texts,
)

KINDS = ["jsonl", "parquet", "text"]


def finish(config, states, epoch):
    """Return the ids that the streams at `states` have yet to read through `epoch`."""
    config = replace(config, sequence_length=1, batch_size=1)
    streams = restored(config, [before_next_document(config, state) for state in states])
    return [token for stream in streams for token in read_through(stream, epoch)]


def restored(config, states):
    streams = open_streams(config, len(states))
    for stream, state in zip(streams, json.loads(json.dumps(states)), strict=True):
        stream.set_state(state)
    return streams


def run_chain(config, numbers, rng, batches):
    """Read with each of `numbers` of replicas in turn, at random paces; return (last states, ids delivered)."""
    delivered = []
    streams = open_streams(config, numbers[0])
    for following in [*numbers[1:], None]:
        for stream in streams:
            for _ in range(rng.integers(0, batches)):
                delivered += next(stream)["input_ids"].ravel().tolist()
        states = [stream.get_state() for stream in streams]
        if following is not None:
            states = redistribute(states, following)
            streams = restored(config, states)
    return states, delivered


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_is_skipped_or_repeated_in_the_epoch(tmp_path, kind):
    config, count = write_counting(kind, tmp_path / "data", 150)
    for numbers in [(4, 2), (2, 4), (4, 2, 4), (3, 5, 2), (1, 4, 1, 3), (2, 2)]:
        rng = np.random.default_rng(len(numbers))
        states, delivered = run_chain(config, numbers, rng, batches=8)
        delivered += finish(config, states, 0)
        assert Counter(delivered) == dict.fromkeys(range(count), 1), numbers


@pytest.mark.parametrize("kind", KINDS)
def test_redistributing_replicas_of_different_epochs_completes_every_begun_epoch(tmp_path, kind):
    config, count = write_counting(kind, tmp_path / "data", 13)
    states, delivered = run_chain(config, (3, 2, 3), np.random.default_rng(1), batches=22)
    last = max(state["positions"]["data"]["epoch"] for state in states)
    assert last >= 2
    delivered += finish(config, states, last)
    assert Counter(delivered) == dict.fromkeys(range(count), last + 1)


def test_merged_shards_are_read_alternately_after_their_partly_read_documents(tmp_path):
    config, _ = write_counting("text", tmp_path / "data", 16)
    config = replace(config, shuffle_buffer=1, sequence_length=1, batch_size=1)
    streams, spans = open_streams(config, 4), documents(16)
    taken = {0: spans[0][1] + 1, 1: spans[1][1] - 1}  # replica 0 is in its second document, replica 1 in its first
    for replica, count in taken.items():
        for _ in range(count):
            next(streams[replica])
    merged, _ = restored(config, redistribute([stream.get_state() for stream in streams], 2))
    begun = [*range(spans[4][0] + 1, sum(spans[4])), spans[1][0] + spans[1][1] - 1]
    turns = [token for k in (8, 5, 12, 9, 13) for token in range(spans[k][0], sum(spans[k]))]
    assert read_through(merged, 0) == begun + turns


def test_the_rest_of_an_earlier_epoch_comes_before_a_later_one(tmp_path):
    """Replica 0 is an epoch ahead of replica 1, whose documents it takes over."""
    config, _ = write_counting("text", tmp_path / "data", 16)
    config = replace(config, shuffle_buffer=1, sequence_length=1, batch_size=1)
    streams, spans = open_streams(config, 4), documents(16)
    read_through(streams[0], 0)
    next(streams[1])
    merged, _ = restored(config, redistribute([stream.get_state() for stream in streams], 2))
    tokens = {k: list(range(spans[k][0], sum(spans[k]))) for k in range(16)}
    begun = tokens[1][1:]
    earlier = [token for k in (5, 9, 13) for token in tokens[k]]
    found = [int(next(merged)["input_ids"][0, 0]) for _ in range(len(begun) + len(earlier))]
    assert found == begun + earlier


def test_splitting_a_shard_deals_its_documents_out_by_turns(tmp_path):
    config, _ = write_counting("text", tmp_path / "data", 10)
    config = replace(config, shuffle_buffer=1, sequence_length=1, batch_size=1)
    (stream,), spans = open_streams(config, 1), documents(10)
    next(stream)
    found = [read_through(s, 0) for s in restored(config, redistribute([stream.get_state()], 3))]
    tokens = [list(range(first, first + count)) for first, count in spans]
    part = [int(3 * (document * (5**0.5 - 1) / 2 % 1)) for document in range(10)]
    expected = [[token for k in range(1, 10) if part[k] == replica for token in tokens[k]] for replica in range(3)]
    expected[0] = tokens[0][1:] + expected[0]  # the partly read document
    assert found == expected


@pytest.mark.parametrize("numbers", [(4, 3), (3, 4), (4, 3, 2), (2, 5, 3)])
def test_the_rest_of_an_epoch_is_divided_equally(tmp_path, numbers):
    write_texts(tmp_path / "data", [f"{k:04d} 1" for k in range(400)])
    config, _ = write_counting("text", tmp_path / "other", 3)
    config = replace(config, path=str(tmp_path / "data"), sequence_length=1, batch_size=1)
    streams = open_streams(config, numbers[0])
    for following in numbers[1:]:
        for stream in streams:
            for _ in range(40):
                next(stream)
        streams = restored(config, redistribute([stream.get_state() for stream in streams], following))
    read = 40 * sum(numbers[:-1])
    for stream in streams:
        assert abs(len(read_through(stream, 0)) - (400 - read) / numbers[-1]) <= 5


def test_few_shards_of_a_replica_are_open_after_many_changes(tmp_path):
    config, count = write_counting("text", tmp_path / "data", 1200)
    numbers = (8, 7, 8, 7, 8, 7, 8, 7, 6, 8, 7)
    rng = np.random.default_rng(0)
    streams, delivered = open_streams(config, numbers[0]), []
    for following in numbers[1:]:
        for stream in streams:
            for _ in range(rng.integers(0, 5)):
                delivered += next(stream)["input_ids"].ravel().tolist()
        states = redistribute([stream.get_state() for stream in streams], following)
        shards = [state["positions"]["data"]["shards"] for state in states]
        assert max(sum(first < end for *_, first, end, _, _ in its) for its in shards) <= 4, following
        streams = restored(config, states)
    delivered += finish(config, states, 0)
    assert Counter(delivered) == dict.fromkeys(range(count), 1)


def test_what_was_divided_often_stays_whole_and_is_not_lost():
    """Its documents would be looked for in vain among millions."""

    def width(state):
        return sum(end - first for *_, first, end, _, _ in state["positions"]["data"]["shards"])

    state = {"replica": 0, "num_replicas": 1, "source": {}, "positions": {"data": start_position(0, 1).to_json()}}
    whole = width(state)
    for _ in range(5):
        parts = redistribute([state], 40)
        assert sum(map(width, parts)) == width(state)
        state = min(filter(width, parts), key=width) | {"replica": 0, "num_replicas": 1}
    assert width(state) * 2**16 >= whole


def test_states_of_several_checkpoints_are_refused(tmp_path):
    config, _ = write_counting("text", tmp_path / "data", 23)
    states = [stream.get_state() for stream in open_streams(config, 3)]
    with pytest.raises(UserError, match="position 1 of 2 is that of replica 1 of 3"):
        redistribute([states[0] | {"num_replicas": 2}, states[1]], 1)
    with pytest.raises(UserError, match="at least one"):
        redistribute(states, 0)
    other = states[2] | {"source": states[2]["source"] | {"files": 99}}
    with pytest.raises(UserError, match="replicas 0 and 2 are of different data sets"):
        redistribute([*states[:2], other], 1)
