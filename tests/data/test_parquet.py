"""Parquet rows as sequences, against loops over the rows."""

import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from noloco_jax.config import DataConfig
from noloco_jax.data import ByteTokenizer
from noloco_jax.errors import UserError
from support.data_makers import check_data, needs_tokenizer, train_stream, validation_batches, write_rows


def all_of_validation(config, folder, tokenizer=None):
    """Return (input ids, labels) of all sequences of a folder's rows, in file order."""
    config = replace(config, path="elsewhere", validation_path=str(folder))
    batches = validation_batches(config, tokenizer, num_batches=1000)
    return [np.concatenate([batch[name] for batch in batches]) for name in ("input_ids", "labels")]


def config_for(length):
    return DataConfig(kind="parquet", sequence_length=length, batch_size=1)


def random_rows(count, length, seed=0):
    return np.random.default_rng(seed).integers(1, 1000, (count, length), dtype=np.int32)


def masked_rows():
    """Return four rows of 12 ids, padded with 0 nowhere, behind, everywhere and in front, and their attention masks."""
    rows = random_rows(4, 12)
    mask = np.ones_like(rows)
    mask[1, 7:] = 0
    mask[2, :] = 0
    mask[3, :3] = 0
    return rows * mask, mask


def labels_by_hand(row, mask):
    return [row[t + 1] if t < 11 and mask[t] and mask[t + 1] else -100 for t in range(12)]


def padding_last(values, mask):
    """Return a row's values with those of its padding moved to the end."""
    values = list(values)
    return [v for v, m in zip(values, mask, strict=True) if m] + [v for v, m in zip(values, mask, strict=True) if not m]


def test_stored_labels_are_kept_unchanged(tmp_path):
    rows = random_rows(20, 8)
    labels = np.where(rows % 3, rows + 1000, -100)  # of which some are out of the loss
    for row_group_size in (1, 3, 50):
        write_rows(tmp_path / "0.parquet", {"input_ids": list(rows), "label": list(labels)}, row_group_size)
        found = all_of_validation(config_for(8), tmp_path)
        np.testing.assert_array_equal(found[0], rows)
        np.testing.assert_array_equal(found[1], labels)


def test_other_negative_labels_are_refused(tmp_path):
    for label in (-1, -99, -101):
        labels = random_rows(4, 8, seed=1)
        labels[2, 5] = label
        write_rows(tmp_path / "0.parquet", {"input_ids": list(random_rows(4, 8)), "label": list(labels)})
        with pytest.raises(UserError, match=rf"0\.parquet: label holds {label}, .*: write -100"):
            all_of_validation(config_for(8), tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("input_ids", 2**32 + 5, pa.int64()),
        ("input_ids", 2**64 - 5, pa.uint64()),
        ("input_ids", -(2**32) + 5, pa.int64()),
        ("label", 2**32 - 100, pa.int64()),
        ("label", 2**64 - 100, pa.uint64()),
        ("labels", 2**31, pa.uint32()),
    ],
)
def test_integers_beyond_int32_are_refused_instead_of_wrapping(tmp_path, name, value, kind):
    rows = random_rows(4, 8).tolist()
    columns = {"input_ids": rows, "label" if name == "input_ids" else name: [[*row[1:], row[0]] for row in rows]}
    columns[name] = [*rows[:2], [value, *rows[2][1:]], rows[3]]
    kinds = {other: pa.list_(kind if other == name else pa.int64()) for other in columns}
    pq.write_table(
        pa.table({other: pa.array(columns[other], kinds[other]) for other in columns}), tmp_path / "0.parquet"
    )
    with pytest.raises(UserError, match=rf"0\.parquet: {name} holds what is no token id .*{value}") as caught:
        all_of_validation(config_for(8), tmp_path)
    assert "\n" not in str(caught.value)


def test_a_label_outside_the_vocabulary_is_refused(tmp_path):
    write_rows(tmp_path / "0.parquet", {"input_ids": [[1, 2, 3]] * 4, "label": [[2, 3, 40]] * 4})
    config = replace(config_for(2), path=str(tmp_path))
    check_data(config, vocab_size=41)
    with pytest.raises(UserError, match=r"holds token id 40, but model\.vocab_size=40"):
        check_data(config, vocab_size=40)


def test_padding_before_or_between_tokens_is_moved_behind_them(tmp_path):
    rows, mask = random_rows(40, 12), (np.random.default_rng(1).random((40, 12)) < 0.8).astype(np.int32)
    write_rows(tmp_path / "0.parquet", {"input_ids": list(rows), "attention_mask": list(mask)}, 7)
    config = replace(config_for(12), path="elsewhere", validation_path=str(tmp_path), document_mask=True)
    batches = validation_batches(config, None, num_batches=1000)
    assert len(batches) == 40
    for row, its_mask, batch in zip(rows, mask, batches, strict=True):
        np.testing.assert_array_equal(batch["input_ids"][0], padding_last(row * its_mask, its_mask))
        np.testing.assert_array_equal(batch["labels"][0], padding_last(labels_by_hand(row, its_mask), its_mask))
        np.testing.assert_array_equal(batch["segment_ids"][0], padding_last(its_mask, its_mask))


def test_longer_rows_are_split_and_parts_of_only_padding_are_left_out(tmp_path):
    rows, mask = masked_rows()
    write_rows(tmp_path / "0.parquet", {"input_ids": list(rows), "attention_mask": list(mask)})
    inputs, labels = all_of_validation(config_for(4), tmp_path)
    kept = [(0, 0), (0, 4), (0, 8), (1, 0), (1, 4), (3, 0), (3, 4)]  # row 1 has 7 tokens, the ninth of row 3 no label
    np.testing.assert_array_equal(inputs, [padding_last(rows[k], mask[k])[t : t + 4] for k, t in kept])
    expected = [padding_last(labels_by_hand(rows[k], mask[k]), mask[k]) for k in range(4)]
    np.testing.assert_array_equal(labels, [expected[k][t : t + 4] for k, t in kept])


def test_hugging_face_labels_are_shifted_within_their_row(tmp_path):
    rows = random_rows(3, 8)
    stored = rows.copy()
    stored[0, :3] = -100  # a prompt
    stored[2, 4:] = -100  # padding
    write_rows(tmp_path / "0.parquet", {"input_ids": list(rows), "labels": list(stored)})
    expected = [[*row[1:], -100] for row in stored.tolist()]
    inputs, labels = all_of_validation(config_for(8), tmp_path)
    np.testing.assert_array_equal(inputs, rows)
    np.testing.assert_array_equal(labels, expected)
    inputs, _ = all_of_validation(config_for(4), tmp_path)  # the last sequence of row 2 has no label
    np.testing.assert_array_equal(inputs, rows.reshape(6, 4)[:5])


def test_labels_take_precedence_over_the_mask_and_a_scalar_label_is_ignored(tmp_path):
    rows = random_rows(4, 8)
    columns = {"input_ids": rows.tolist(), "attention_mask": np.ones_like(rows).tolist(), "label": [0, 1, 0, 1]}
    labels = [[*row[1:], -100] for row in rows.tolist()]
    pq.write_table(pa.table(columns), tmp_path / "0.parquet")
    np.testing.assert_array_equal(all_of_validation(config_for(8), tmp_path)[1], labels)
    columns["labels"] = [[-100, *row[1:]] for row in rows.tolist()]
    columns["labels"][2][7] = -100
    labels[2][6] = -100
    pq.write_table(pa.table(columns), tmp_path / "0.parquet")
    np.testing.assert_array_equal(all_of_validation(config_for(8), tmp_path)[1], labels)


@pytest.mark.parametrize("name", ["labels", "label"])
def test_a_mask_beside_labels_tells_what_padding_is(tmp_path, name):
    rows, mask = masked_rows()
    stored = [labels_by_hand(row, its_mask) for row, its_mask in zip(rows, mask, strict=True)]
    if name == "labels":
        stored = [np.where(its_mask, row, -100) for row, its_mask in zip(rows, mask, strict=True)]
    write_rows(tmp_path / "0.parquet", {"input_ids": list(rows), "attention_mask": list(mask), name: stored})
    inputs, labels = all_of_validation(config_for(12), tmp_path)
    kept = [0, 1, 3] if name == "labels" else [0, 1, 2, 3]  # a row of padding alone has no label to train on
    np.testing.assert_array_equal(inputs, [padding_last(rows[k], mask[k]) for k in kept])
    np.testing.assert_array_equal(labels, [padding_last(labels_by_hand(rows[k], mask[k]), mask[k]) for k in kept])


def test_a_page_whose_checksum_is_wrong_is_left_out(tmp_path, capfd):
    path = tmp_path / "0.parquet"
    texts = pa.table({"text": [f"document {k:03}" for k in range(8)]})
    pq.write_table(texts, path, compression="none", use_dictionary=False, write_page_checksum=True)
    path.write_bytes(path.read_bytes().replace(b"document 003", b"dokument 003"))
    with pytest.raises(UserError, match="no token to predict"):
        all_of_validation(replace(config_for(8), tokenizer="byte"), tmp_path, ByteTokenizer())
    assert re.search(r"0\.parquet is damaged .*CRC", capfd.readouterr().err)


def test_labels_that_are_shifted_already_are_refused(tmp_path):
    rows = random_rows(4, 8)
    write_rows(tmp_path / "0.parquet", {"input_ids": list(rows[:, :-1]), "labels": list(rows[:, 1:])})
    with pytest.raises(UserError, match=r"0\.parquet: labels holds the ids that follow.*: name the column label"):
        all_of_validation(config_for(7), tmp_path)


def test_a_label_that_equals_the_ids_is_refused(tmp_path):
    """A model that is trained on it learns to copy its input."""
    rows = random_rows(4, 8)
    stored = np.where(np.arange(8) < 3, -100, rows)
    write_rows(tmp_path / "0.parquet", {"input_ids": list(rows), "label": list(stored)})
    with pytest.raises(UserError, match=r"0\.parquet: label equals input_ids.*: name the column labels"):
        check_data(replace(config_for(8), path=str(tmp_path)))


@pytest.mark.parametrize("name", ["labels", "label"])
def test_labels_of_one_repeated_token_are_accepted(tmp_path, name):
    rows = np.full((2, 4), 7)
    write_rows(tmp_path / "0.parquet", {"input_ids": list(rows), name: list(rows)})
    last = {"labels": -100, "label": 7}[name]
    np.testing.assert_array_equal(all_of_validation(config_for(4), tmp_path)[1], [[7, 7, 7, last]] * 2)


def test_ids_alone_are_labelled_by_the_next_of_their_row(tmp_path):
    rows = random_rows(3, 8)
    write_rows(tmp_path / "0.parquet", {"input_ids": list(rows)})
    assert not needs_tokenizer(replace(config_for(8), path=str(tmp_path)))
    inputs, labels = all_of_validation(config_for(8), tmp_path)
    np.testing.assert_array_equal(inputs, rows)
    np.testing.assert_array_equal(labels, [[*row[1:], -100] for row in rows.tolist()])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("text", "text is null"),
        ("null list", "input_ids is null"),
        ("null in a list", "labels holds a null"),
        ("fewer labels", "labels is not as long as input_ids"),
    ],
)
def test_a_row_that_cannot_be_read_is_an_empty_row_that_is_told(tmp_path, capfd, kind, reason):
    """It keeps its number, so that a saved position stays that of the same rows."""
    rows: list = [[k, k + 1] for k in range(0, 600, 2)]
    values: dict[str, list] = {"input_ids": [*rows], "labels": [*rows]}
    if kind == "text":
        values = {"text": [f"{k:3}" for k in range(300)]}
        values["text"][210] = None
    elif kind == "null list":
        values["input_ids"][210] = None
    elif kind == "null in a list":
        values["labels"][210] = [None, 421]
    else:
        values["labels"][210] = [420]
    # Row numbers restart in each file and continue across its row groups.
    pq.write_table(pa.table({name: column[:30] for name, column in values.items()}), tmp_path / "0.parquet")
    pq.write_table(
        pa.table({name: column[30:] for name, column in values.items()}), tmp_path / "1.parquet", row_group_size=37
    )
    length = 3 if kind == "text" else 2
    config = replace(config_for(length), add_bos=False, add_eos=False)
    inputs, _ = all_of_validation(config, tmp_path, ByteTokenizer())
    found = [int(bytes(row.tolist())) for row in inputs[:-1]] if kind == "text" else inputs[:, 0] // 2
    assert list(found) == [k for k in range(299 if kind == "text" else 300) if k != 210]
    [told] = capfd.readouterr().err.splitlines()
    assert f"1.parquet, row 180 (counted from 0): {reason}" in told


@pytest.mark.parametrize(
    "kind",
    [
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.large_string()),
        pa.large_string(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int8(), pa.binary()),
    ],
    ids=str,
)
def test_text_is_read_from_every_arrow_string_type(tmp_path, kind):
    texts = ["one", "", "zwei drei", "one", "四"]
    column = pa.array(texts).cast(kind)
    pq.write_table(pa.table({"text": column}), tmp_path / "0.parquet", row_group_size=2)
    assert needs_tokenizer(replace(config_for(2), path=str(tmp_path)))
    inputs, _ = all_of_validation(config_for(64), tmp_path, ByteTokenizer())
    expected = [token for text in texts if text for token in (256, *text.encode(), 257)]
    np.testing.assert_array_equal(inputs[0, : len(expected) - 1], expected[:-1])


@pytest.mark.parametrize(
    ("values", "kind", "said"),
    [
        ([1, 2], pa.int64(), "int64"),
        ([{"body": "a"}, {"body": "b"}], pa.struct([("body", pa.string())]), r"struct<body: string>"),
        ([["a"], ["b"]], pa.list_(pa.string()), r"list<.*: string>"),
    ],
)
def test_a_text_column_of_another_type_is_refused_naming_the_type(tmp_path, values, kind, said):
    pq.write_table(pa.table({"text": pa.array(values, kind)}), tmp_path / "0.parquet")
    with pytest.raises(UserError, match=rf"0\.parquet has the columns text \({said}\): expected strings in 'text'"):
        needs_tokenizer(replace(config_for(2), path=str(tmp_path)))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()], ids=str)
def test_text_that_is_not_utf8_is_read_with_replacements(tmp_path, kind):
    texts = [b"text %d" % k for k in range(9)]
    texts[3] = b"caf\xe9!"
    stored = pa.array(texts, pa.large_binary() if str(kind).startswith("large") else pa.binary())
    column = pa.Array.from_buffers(kind, len(texts), stored.buffers())
    pq.write_table(pa.table({"text": column}), tmp_path / "0.parquet", row_group_size=2)
    config = replace(config_for(200), add_bos=False, add_eos=False)
    inputs, _ = all_of_validation(config, tmp_path, ByteTokenizer())
    assert ByteTokenizer().decode(inputs[0]).startswith("text 0text 1text 2caf\ufffd!text 4")


def test_text_needs_a_tokenizer_and_tokens_need_none(tmp_path):
    write_rows(tmp_path / "tokens" / "0.parquet", {"input_ids": [[1, 2]] * 4, "labels": [[1, 2]] * 4})
    (tmp_path / "text").mkdir()
    pq.write_table(pa.table({"input_ids": [[1], [3]], "text": ["a", "b"]}), tmp_path / "text" / "0.parquet")
    assert not needs_tokenizer(replace(config_for(2), path=str(tmp_path / "tokens")))
    assert needs_tokenizer(replace(config_for(2), path=str(tmp_path / "text")))
    with pytest.raises(UserError, match=r"holds text in .*text/0\.parquet and tokens in .*tokens/0\.parquet"):
        needs_tokenizer(replace(config_for(2), path=str(tmp_path)))


@pytest.mark.parametrize(
    "kinds",
    [
        (pa.list_(pa.int64()), pa.large_list(pa.bool_())),
        (pa.list_(pa.uint16(), 12), pa.list_(pa.int8(), 12)),
        (pa.large_list(pa.uint32()), pa.list_(pa.int64())),
    ],
    ids=str,
)
def test_integers_and_lists_of_every_width_are_read(tmp_path, kinds):
    rows, mask = masked_rows()
    ids, attended = (pa.array(value.tolist()).cast(kind) for value, kind in zip((rows, mask == 1), kinds, strict=True))
    pq.write_table(pa.table({"input_ids": ids, "attention_mask": attended}), tmp_path / "0.parquet")
    inputs, labels = all_of_validation(config_for(12), tmp_path)
    np.testing.assert_array_equal(inputs, [padding_last(rows[k], mask[k]) for k in (0, 1, 3)])
    np.testing.assert_array_equal(labels, [padding_last(labels_by_hand(rows[k], mask[k]), mask[k]) for k in (0, 1, 3)])


@pytest.mark.parametrize("row_group_size", [1, 7, 1000])
def test_an_epoch_holds_every_row_once_whatever_the_row_groups(tmp_path, row_group_size):
    for number in range(3):
        rows = np.arange(100 * number, 100 * number + 90)[:, None].repeat(5, axis=1)
        write_rows(tmp_path / f"{number}.parquet", {"input_ids": list(rows), "label": list(rows)}, row_group_size)
    config = replace(config_for(5), path=str(tmp_path), validation_path="elsewhere", shuffle_buffer=8)
    for num_replicas in (1, 3):
        found = []
        for replica in range(num_replicas):
            stream = train_stream(config, None, replica=replica, num_replicas=num_replicas, seed=0)
            found += [int(next(stream)["input_ids"][0, 0]) for _ in range(270 // num_replicas)]
        assert found != sorted(found)
        assert sorted(found) == [100 * number + k for number in range(3) for k in range(90)]


def test_memory_holds_windows_and_not_row_groups(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 2**31, 4_000_000, dtype=np.int32)  # too random to be compressed
    column, shifted = (pa.FixedSizeListArray.from_arrays(np.roll(tokens, -k), 64) for k in (0, 1))
    pq.write_table(pa.table({"input_ids": column, "label": shifted}), tmp_path / "0.parquet", row_group_size=10**6)
    del column, shifted
    config = replace(config_for(64), path=str(tmp_path), validation_path="elsewhere", shuffle_buffer=10)
    before = pa.total_allocated_bytes()
    stream = train_stream(config, None, replica=0, num_replicas=1, seed=0)
    for _ in range(50):
        next(stream)
    assert pa.total_allocated_bytes() - before < 2 * tokens.nbytes / 4
