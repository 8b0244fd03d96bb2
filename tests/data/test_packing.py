"""Packing against a concatenation split by hand."""

import numpy as np
import pytest

from noloco_jax.data.packing import Packer
from noloco_jax.data.positions import DataPosition, ShardPosition
from noloco_jax.errors import UserError
from noloco_jax.labels import IGNORED_LABEL


def position(document: int, token: int = 0) -> DataPosition:
    return DataPosition(0, (ShardPosition(0, 0, 1, document, stride=1, token=token, seek_hint=()),))


def random_documents(columns: int, count: int = 40) -> list[np.ndarray]:
    rng = np.random.default_rng(columns)
    return [rng.integers(0, 100, (columns, rng.integers(0, 23)), dtype=np.int32) for _ in range(count)]


def pack(documents: list[np.ndarray], batch_size: int, sequence_length: int) -> tuple[list, list, Packer]:
    packer = Packer(len(documents[0]), batch_size, sequence_length)
    batches, positions = [], []
    for number, document in enumerate(documents):
        packer.add(document, position(number))
        while packer.full:
            batches.append(packer.pop())
            positions.append(packer.position)
    return batches, positions, packer


@pytest.mark.parametrize("columns", [1, 2])
def test_sequences_are_slices_of_the_concatenated_documents(columns):
    documents = random_documents(columns)
    tokens = np.concatenate(documents, axis=1)
    labels = tokens[1, :] if columns == 2 else tokens[0, 1:]
    for batch_size, sequence_length in [(1, 1), (1, 7), (3, 5), (2, 64)]:
        batches, _, _ = pack(documents, batch_size, sequence_length)
        assert len(batches) == (tokens.shape[1] - 1) // (batch_size * sequence_length)
        for number, batch in enumerate(batches):
            for row in range(batch_size):
                start = (number * batch_size + row) * sequence_length
                np.testing.assert_array_equal(batch["input_ids"][row], tokens[0, start : start + sequence_length])
                np.testing.assert_array_equal(batch["labels"][row], labels[start : start + sequence_length])
            assert batch["input_ids"].dtype == batch["labels"].dtype == np.int32


def test_the_position_is_that_of_the_next_input_token():
    documents = random_documents(1)
    owners = np.concatenate([np.full(d.shape[1], k) for k, d in enumerate(documents)])
    offsets = np.concatenate([np.arange(d.shape[1]) for d in documents])
    _, positions, _ = pack(documents, 2, 5)
    for number, found in enumerate(positions):
        shard = found.shards[0]
        assert (shard.document, shard.token) == (owners[(number + 1) * 10], offsets[(number + 1) * 10])


def test_a_document_is_taken_from_its_positions_token_on():
    packer = Packer(1, 1, 4)
    packer.add(np.arange(10, dtype=np.int32)[None], position(0, token=7))
    packer.add(np.arange(20, 30, dtype=np.int32)[None], position(1, token=8))
    assert packer.pop()["input_ids"].tolist() == [[7, 8, 9, 28]]


def test_a_token_beyond_the_documents_end_says_that_the_data_changed():
    with pytest.raises(UserError, match="token 7 of a document of 5"):
        Packer(1, 1, 4).add(np.zeros((1, 5), np.int32), position(0, token=7))


@pytest.mark.parametrize("columns", [1, 2])
def test_the_rest_is_filled_up_with_ignored_labels(columns):
    documents = random_documents(columns, count=9)
    tokens = np.concatenate(documents, axis=1)
    inputs, labels = (tokens[0, :-1], tokens[0, 1:]) if columns == 1 else tokens
    batches, _, packer = pack(documents, 2, 16)
    taken = len(batches) * 32
    rest = packer.pop_rest()
    assert rest is not None
    np.testing.assert_array_equal(rest["input_ids"].ravel()[: len(inputs) - taken], inputs[taken:])
    np.testing.assert_array_equal(rest["labels"].ravel()[: len(labels) - taken], labels[taken:])
    assert (rest["labels"].ravel()[len(labels) - taken :] == IGNORED_LABEL).all()


def test_a_rest_without_a_label_is_none():
    packer = Packer(1, 2, 4)
    packer.add(np.array([[3]], np.int32), position(0))  # no token follows it
    assert packer.pop_rest() is None
