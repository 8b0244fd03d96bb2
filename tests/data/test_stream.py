"""Streams: the documents that each replica reads, and resuming with the same batches."""

import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from noloco_jax.config import DataConfig
from noloco_jax.errors import UserError
from support.data_makers import (
    CountingTokenizer,
    documents,
    open_streams,
    read_through,
    train_stream,
    validation_batches,
    write_c4,
    write_counting,
    write_rows,
)

KINDS = ["jsonl", "parquet", "text"]


def take(stream, count):
    return [next(stream) for _ in range(count)]


def assert_same(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_holds_every_token_once_over_all_replicas(tmp_path, kind):
    config, count = write_counting(kind, tmp_path / "data", 23)
    for num_replicas in (1, 3, 4, 5):
        streams = open_streams(replace(config, sequence_length=1, batch_size=1), num_replicas)
        for epoch in range(3):
            seen = Counter(token for stream in streams for token in read_through(stream, epoch))
            assert seen == dict.fromkeys(range(count), 1), (num_replicas, epoch)


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_seeds_and_late_replicas_have_orders_of_their_own_and_each_reads_all_data(tmp_path, kind):
    config, count = write_counting(kind, tmp_path / "data", 23)
    config = replace(config, sequence_length=1, batch_size=1)
    streams = [train_stream(config, CountingTokenizer(), replica=k, num_replicas=2, seed=5) for k in (2, 3)]
    alone = [open_streams(config, 1, seed=seed)[0] for seed in (5, 6)]
    orders = {tuple(read_through(stream, epoch)) for stream in alone for epoch in range(2)}
    for stream in streams:
        for _ in range(2):
            seen = [int(next(stream)["input_ids"][0, 0]) for _ in range(count)]
            assert sorted(seen) == list(range(count))
            orders.add(tuple(seen))
    assert len(orders) == 8


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_resumes_from_its_state_bitwise(tmp_path, kind):
    config, _ = write_counting(kind, tmp_path / "data", 23)
    whole, saved = train_stream(config, CountingTokenizer(), replica=1, num_replicas=2, seed=5), []
    batches = []
    for _ in range(40):  # some epochs
        saved.append(json.dumps(whole.get_state()))
        batches.append(next(whole))
    again = train_stream(config, CountingTokenizer(), replica=1, num_replicas=2, seed=5)
    for start in (0, 39, 7, 1, 20, 13):
        again.set_state(json.loads(saved[start]))
        assert json.dumps(again.get_state()) == saved[start]
        assert_same(take(again, min(6, 40 - start)), batches[start : start + 6])
    assert max(map(len, saved)) < 450


@pytest.mark.parametrize("kind", KINDS)
def test_document_mask_segments_follow_documents_and_resume_bitwise(tmp_path, kind):
    config, _ = write_counting(kind, tmp_path / "data", 23)
    config = replace(config, sequence_length=16, document_mask=True)
    owner = np.concatenate([np.full(count, k) for k, (_, count) in enumerate(documents(23))])
    (stream,), (again,), (plain,) = (open_streams(replace(config, document_mask=on), 1) for on in (True, True, False))
    for _ in range(12):
        state = stream.get_state()
        batch, unmasked = next(stream), next(plain)
        again.set_state(state)
        assert_same([next(again)], [batch])
        assert stream.get_state() == plain.get_state()
        np.testing.assert_array_equal(batch["input_ids"], unmasked["input_ids"])
        owner_BT = owner[batch["input_ids"]]
        np.testing.assert_array_equal(np.diff(batch["segment_ids"]) != 0, np.diff(owner_BT) != 0)
        assert (batch["segment_ids"][:, 0] == 1).all() and (np.diff(batch["segment_ids"]) >= 0).all()
        inside = owner_BT[:, :-1] == owner_BT[:, 1:]
        kept = inside | (kind == "parquet")  # Parquet rows store their labels
        expected = np.where(kept, unmasked["labels"][:, :-1], -100)
        np.testing.assert_array_equal(batch["labels"][:, :-1], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_batch_shape_resumes_at_the_same_token(tmp_path, kind):
    config, _ = write_counting(kind, tmp_path / "data", 60)
    (old,) = open_streams(config, 1)
    (new,) = open_streams(replace(config, batch_size=1, sequence_length=4), 1)
    take(old, 3)
    new.set_state(old.get_state())
    assert next(new)["input_ids"].ravel().tolist() == next(old)["input_ids"].ravel()[:4].tolist()


def test_unshuffled_files_are_dealt_to_replicas_in_sorted_order(tmp_path):
    write_c4(tmp_path, [[f"{100 * file + 10 * k} 10" for k in range(4)] for file in range(5)])
    config, _ = write_counting("jsonl", tmp_path / "unused", 3)
    config = replace(config, path=str(tmp_path), shuffle_buffer=1, batch_size=1, sequence_length=1)
    for replica, stream in enumerate(open_streams(config, 2)):  # the fifth file is cut in the middle
        expected = [100 * file + token for file in range(replica, 4, 2) for token in range(40)]
        assert read_through(stream, 0) == [*expected, *range(400 + 20 * replica, 420 + 20 * replica)]


def test_few_unshuffled_files_are_dealt_to_replicas_by_document(tmp_path):
    config, _ = write_counting("jsonl", tmp_path / "data", 23, files=3)
    config = replace(config, shuffle_buffer=1, batch_size=1, sequence_length=1)
    spans = documents(23)
    for replica, stream in enumerate(open_streams(config, 4)):
        expected = [token for first, count in spans[replica::4] for token in range(first, first + count)]
        assert read_through(stream, 0) == expected


def test_worker_processes_resume_with_the_same_batches(tmp_path):
    config, _ = write_counting("jsonl", tmp_path / "data", 150)
    config = replace(config, document_mask=True, shuffle_buffer=10)  # a worker's turn is of several chunks
    (alone,) = open_streams(config, 1)
    (helped,) = open_streams(replace(config, num_workers=2), 1)
    take(alone, 11)
    helped.set_state(alone.get_state())
    assert_same(take(helped, 200), take(alone, 200))
    assert helped.get_state() == alone.get_state()
    helped.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_of_its_own_data_wherever_their_folder_is(tmp_path, kind):
    config, _ = write_counting(kind, tmp_path / "data", 23)
    larger, _ = write_counting(kind, tmp_path / "larger", 29)
    (stream,), (other,) = open_streams(config, 1), open_streams(larger, 1)
    state = stream.get_state()
    with pytest.raises(UserError, match="restore the former data"):
        other.set_state(state)
    with pytest.raises(UserError, match="shuffle_buffer 4, this run's has 1"):
        open_streams(replace(config, shuffle_buffer=1), 1)[0].set_state(state)
    (tmp_path / "data").rename(tmp_path / "moved")
    moved = replace(config, path=str(tmp_path / "moved"))
    open_streams(moved, 1)[0].set_state(state)
    first = min((tmp_path / "moved").iterdir())
    first.rename(first.with_name(first.name.replace("0", "7", 1)))
    with pytest.raises(UserError, match="names and sizes"):
        open_streams(moved, 1)[0].set_state(state)


def test_file_versions_on_a_server_are_compared_where_both_sides_have_them(tmp_path):
    config, _ = write_counting("jsonl", tmp_path / "data", 23)
    (stream,) = open_streams(config, 1)
    state = stream.get_state()
    stream.set_state(state | {"source": stream.source | {"file versions": "1"}})
    stream.source["file versions"] = "2"
    with pytest.raises(UserError, match=r"file versions '1', .*restore the former data"):
        stream.set_state(state | {"source": stream.source | {"file versions": "1"}})


class OtherTokenizer(CountingTokenizer):
    fingerprint = "other"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_state_of_texts_that_were_read_otherwise_is_refused_by_name(tmp_path, kind):
    texts = [{"text": f"{10 * k} 9", "body": f"{10 * k} 9"} for k in range(9)]
    (tmp_path / "0.jsonl").write_text("".join(json.dumps(document) + "\n" for document in texts))
    pq.write_table(pa.Table.from_pylist(texts), tmp_path / "0.parquet")
    config = DataConfig(kind=kind, path=str(tmp_path), sequence_length=4, batch_size=1)
    (stream,) = open_streams(config, 1)
    for fields, tokenizer, told in (
        ({"text_column": "body"}, None, "text column 'text', this run's has 'body'"),
        ({"add_bos": False}, None, "add_bos True, this run's has False"),
        ({"add_eos": False}, None, "add_eos True, this run's has False"),
        ({}, OtherTokenizer(), "tokenizer 'counting', this run's has 'other'"),
    ):
        (other,) = open_streams(replace(config, **fields), 1, tokenizer)
        with pytest.raises(UserError, match=told):
            other.set_state(stream.get_state())


def test_a_state_of_stored_tokens_ignores_the_tokenizer(tmp_path):
    config, _ = write_counting("parquet", tmp_path / "data", 23)
    (stream,), (other,) = open_streams(config, 1), open_streams(config, 1, OtherTokenizer())
    other.set_state(stream.get_state())


def test_a_state_of_another_replica_is_refused(tmp_path):
    config, _ = write_counting("text", tmp_path / "data", 23)
    one, two = open_streams(config, 2)
    with pytest.raises(UserError, match="replica 0 was given to replica 1"):
        two.set_state(one.get_state())
    with pytest.raises(UserError, match=r"num_replicas=3.*of 2 replicas"):
        open_streams(config, 3)[0].set_state(one.get_state())


@pytest.mark.parametrize("kind", KINDS)
def test_validation_is_the_same_at_every_call_and_repeats_nothing(tmp_path, kind):
    config, _ = write_counting(kind, tmp_path / "data", 20)
    spans = documents(20)
    other, _ = write_counting(kind, tmp_path / "held", 20)
    config = replace(config, validation_path=other.path)
    total = sum(spans[-1])
    batches = validation_batches(config, CountingTokenizer(), num_batches=1000)
    assert_same(batches, validation_batches(config, CountingTokenizer(), num_batches=1000))
    scored = np.concatenate([b["input_ids"][b["labels"] != -100] for b in batches])
    if kind == "text":  # shuffled
        labels = np.concatenate([b["labels"][b["labels"] != -100] for b in batches])
        assert sorted([*scored, labels[-1]]) == list(range(total))  # the last token of all has no label
        assert (labels[:-1] == scored[1:]).all()
    else:
        assert scored.tolist() == list(range(total - (kind != "parquet")))
        for batch in batches:
            assert ((batch["labels"] == batch["input_ids"] + 1) | (batch["labels"] == -100)).all()
    assert_same(validation_batches(config, CountingTokenizer(), num_batches=2), batches[:2])


@pytest.mark.parametrize("num_batches", [1, 5])
def test_validation_text_shorter_than_a_sequence_is_told(tmp_path, capfd, num_batches):
    (tmp_path / "0.jsonl").write_text('{"text": "0 8"}\n{"text": "8 8"}\n')
    config, _ = write_counting("jsonl", tmp_path / "data", 3)
    config = replace(config, validation_path=str(tmp_path / "0.jsonl"), batch_size=2)
    for length, told in ((15, ""), (16, ""), (17, "data.sequence_length=17, .* hold only 15 tokens to predict: lower")):
        validation_batches(replace(config, sequence_length=length), CountingTokenizer(), num_batches=num_batches)
        assert re.search(told, printed := capfd.readouterr().err) and bool(printed) == bool(told)


def test_validation_rows_with_few_labels_are_not_told_to_be_short(tmp_path, capfd):
    write_rows(tmp_path / "0.parquet", {"input_ids": [[1, 2, 3, 4]] * 3, "labels": [[-100, -100, 3, -100]] * 3})
    config = DataConfig(
        kind="parquet", path="elsewhere", validation_path=str(tmp_path), sequence_length=4, batch_size=1
    )
    assert len(validation_batches(replace(config, batch_size=1), None, num_batches=1)) == 1
    assert not capfd.readouterr().err


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text"])
def test_held_out_documents_are_never_trained_on(tmp_path, kind):
    config, total = write_counting(kind, tmp_path / "data", 120)
    config = replace(config, validation_path="", batch_size=1, sequence_length=1)
    batches = validation_batches(config, CountingTokenizer(), num_batches=1000)
    held_out = {int(token) for batch in batches for token in (batch["input_ids"][0, 0], batch["labels"][0, 0])}
    trained = [token for stream in open_streams(config, 3) for token in read_through(stream, 0)]
    if kind == "parquet":
        held_out -= {first for first, _ in documents(120)}  # the stored label of a row's last token
    assert held_out
    assert not held_out & set(trained)
    assert len(set(trained)) == len(trained)
    assert 0.95 * total < len(trained) < total
