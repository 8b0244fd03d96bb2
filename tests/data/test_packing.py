"""Packing against a concatenation split by hand."""

import itertools

import numpy as np
import pytest

from noloco_jax.data.packing import Packer
from noloco_jax.data.positions import DataPosition, shard_start
from noloco_jax.data.source import IGNORED_LABEL, PADDING
from noloco_jax.errors import UserError


def position(document: int, token: int = 0) -> DataPosition:
    return DataPosition(0, (shard_start(0, 0, 1)._replace(document=document, token=token),))


def random_documents(columns: int, count: int = 40) -> list[np.ndarray]:
    rng = np.random.default_rng(columns)
    return [rng.integers(0, 100, (columns, rng.integers(0, 23)), dtype=np.int32) for _ in range(count)]


def pack(
    documents: list[np.ndarray], sequence_length: int, *, document_mask: bool = False
) -> tuple[list, list, Packer]:
    packer = Packer(len(documents[0]), sequence_length, document_mask=document_mask)
    sequences, positions = [], []
    for number, document in enumerate(documents):
        packer.add(document, position(number))
        while packer.full:
            sequences.append(packer.pop())
            positions.append(packer.position)
    return sequences, positions, packer


@pytest.mark.parametrize("columns", [1, 2])
def test_sequences_are_slices_of_the_concatenated_documents(columns):
    documents = random_documents(columns)
    tokens = np.concatenate(documents, axis=1)
    labels = tokens[1, :] if columns == 2 else tokens[0, 1:]
    for sequence_length in (1, 7, 15, 64):
        sequences, _, _ = pack(documents, sequence_length)
        assert len(sequences) == (tokens.shape[1] - 1) // sequence_length
        for number, sequence in enumerate(sequences):
            start = number * sequence_length
            np.testing.assert_array_equal(sequence["input_ids"], tokens[0, start : start + sequence_length])
            np.testing.assert_array_equal(sequence["labels"], labels[start : start + sequence_length])
            assert sequence["input_ids"].dtype == sequence["labels"].dtype == np.int32


def test_the_position_is_that_of_the_next_input_token():
    documents = random_documents(1)
    owners = np.concatenate([np.full(d.shape[1], k) for k, d in enumerate(documents)])
    offsets = np.concatenate([np.arange(d.shape[1]) for d in documents])
    _, positions, _ = pack(documents, 10)
    for number, found in enumerate(positions):
        shard = found.shards[0]
        assert (shard.document, shard.token) == (owners[(number + 1) * 10], offsets[(number + 1) * 10])


def test_a_position_beyond_the_end_of_its_document_is_refused():
    with pytest.raises(UserError, match="token 7 of a document of 5"):
        Packer(1, 4, document_mask=False).add(np.zeros((1, 5), np.int32), position(0, token=7))


@pytest.mark.parametrize("columns", [1, 2])
def test_the_last_sequence_is_padded_with_ignored_labels(columns):
    documents = random_documents(columns, count=9)
    tokens = np.concatenate(documents, axis=1)
    inputs, labels = (tokens[0, :-1], tokens[0, 1:]) if columns == 1 else tokens
    sequences, _, packer = pack(documents, 32)
    taken = len(sequences) * 32
    rest = packer.pop_rest()
    assert rest is not None
    np.testing.assert_array_equal(rest["input_ids"].ravel()[: len(inputs) - taken], inputs[taken:])
    np.testing.assert_array_equal(rest["labels"].ravel()[: len(labels) - taken], labels[taken:])
    assert (rest["labels"].ravel()[len(labels) - taken :] == IGNORED_LABEL).all()


def test_leftover_tokens_without_a_label_make_no_sequence():
    packer = Packer(1, 4, document_mask=False)
    packer.add(np.array([[3]], np.int32), position(0))  # no token follows it
    assert packer.pop_rest() is None


@pytest.mark.parametrize("columns", [1, 2])
def test_the_document_mask_numbers_segments_and_drops_labels_across_documents(columns):
    documents = random_documents(columns)
    owners = [k for k, d in enumerate(documents) for _ in range(d.shape[1])]
    followed = [one == other for one, other in itertools.pairwise(owners)]
    owners = owners[: len(followed)] if columns == 1 else owners  # the last token of all is only a label
    plain, _, plain_packer = pack(documents, 16)
    masked, _, packer = pack(documents, 16, document_mask=True)
    rows = [tuple(sequence.values()) for sequence in [*masked, packer.pop_rest()]]
    plain_rows = [tuple(sequence.values()) for sequence in [*plain, plain_packer.pop_rest()]]
    for number, ((ids, labels, segments), (same_ids, same_labels)) in enumerate(zip(rows, plain_rows, strict=True)):
        here = slice(16 * number, 16 * number + 16)
        distinct = sorted(set(owners[here]))
        expected = [1 + distinct.index(owner) for owner in owners[here]]
        np.testing.assert_array_equal(segments, expected + [0] * (16 - len(expected)))
        np.testing.assert_array_equal(ids, same_ids)
        if columns == 1:
            same_labels = np.where((followed[here] + [False] * 16)[:16], same_labels, IGNORED_LABEL)
        np.testing.assert_array_equal(labels, same_labels)


def padded_documents(sequence_length: int, seed: int) -> list[np.ndarray]:
    """Return padded rows, most as long as one or two sequences and some shorter."""
    rng, documents, first = np.random.default_rng(seed), [], 0
    for _ in range(30):
        length = int(rng.choice([sequence_length, sequence_length, 2 * sequence_length, 3]))
        tokens = int(rng.integers(1, length + 1))
        ids = np.full(length, PADDING)
        ids[:tokens] = np.arange(first, first + tokens)
        labels = np.where(ids == PADDING, IGNORED_LABEL, ids + 1)
        documents.append(np.stack([ids, labels]).astype(np.int32))
        first += tokens
    return documents


@pytest.mark.parametrize("seed", range(2))
def test_padding_comes_after_the_tokens_of_its_sequence(seed):
    documents = padded_documents(8, seed)
    sequences, _, packer = pack(documents, 8, document_mask=True)
    rest = packer.pop_rest()
    sequences += [] if rest is None else [rest]
    segments = np.stack([sequence["segment_ids"] for sequence in sequences])
    assert (np.diff((segments == 0).astype(int), axis=1) >= 0).all()
    assert 0 < (segments == 0).sum() < sum((d[0] == PADDING).sum() for d in documents)  # some kept, some dropped
    inputs = np.stack([sequence["input_ids"] for sequence in sequences])
    labels = np.stack([sequence["labels"] for sequence in sequences])
    tokens = inputs[segments > 0]
    np.testing.assert_array_equal(tokens, np.arange(len(tokens)))  # every token once, in order
    assert len(tokens) == sum((d[0] != PADDING).sum() for d in documents)
    np.testing.assert_array_equal(labels[segments > 0], tokens + 1)
    assert (labels[segments == 0] == IGNORED_LABEL).all() and (inputs[segments == 0] == 0).all()


@pytest.mark.parametrize("seed", range(2))
def test_a_packer_resumed_at_a_position_keeps_the_same_padding(seed):
    documents = padded_documents(8, seed)
    sequences, positions, _ = pack(documents, 8, document_mask=True)
    for number, found in enumerate(positions[:-1], start=1):
        shard = found.shards[0]
        packer = Packer(2, 8, document_mask=True)
        packer.add(documents[shard.document], found)
        for k in range(shard.document + 1, len(documents)):
            packer.add(documents[k], position(k))
        expected = sequences[number]
        for name, x in packer.pop().items():
            np.testing.assert_array_equal(x, expected[name])
