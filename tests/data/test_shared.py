"""The real C4 and Reddit files, against plain loops over them."""

import gzip
import itertools
import json
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from noloco_jax.config import DataConfig
from noloco_jax.data import load_tokenizer
from support.data_makers import check_data, train_stream
from support.paths import SHARED

DATA = SHARED / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")

C4 = DataConfig(
    kind="jsonl",
    path=str(DATA / "c4" / "en"),
    tokenizer=str(DATA / "tokenizers" / "c4_bpe_4096"),
    sequence_length=128,
    batch_size=4,
)


def c4_texts(name):
    with gzip.open(DATA / "c4" / "en" / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def reddit(schema, **fields):
    folder = DATA / "reddit" / schema
    return DataConfig(
        kind="parquet", path=str(folder / "train"), validation_path=str(folder / "dev"), batch_size=4, **fields
    )


def reddit_rows(schema, split):
    tables = [pq.read_table(path) for path in sorted((DATA / "reddit" / schema / split).glob("*.parquet"))]
    return [np.concatenate([np.array(table[k].to_pylist()) for table in tables]) for k in (0, 1)]


def test_an_unshuffled_replica_reads_its_c4_shards_token_by_token():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(C4.tokenizer)
    documents = (
        [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        for text in c4_texts("c4-train.00000-of-00004.json.gz")
    )
    tokens = np.array(list(itertools.islice(itertools.chain.from_iterable(documents), 20 * 512 + 1)))
    stream = train_stream(
        replace(C4, shuffle_buffer=1), load_tokenizer(C4.tokenizer), replica=0, num_replicas=4, seed=0
    )
    for k in range(20):
        batch = next(stream)
        np.testing.assert_array_equal(batch["input_ids"].ravel(), tokens[512 * k : 512 * (k + 1)])
        np.testing.assert_array_equal(batch["labels"].ravel(), tokens[512 * k + 1 : 512 * (k + 1) + 1])


@pytest.mark.parametrize("schema", ["hdee_schema", "readme_schema"])
def test_an_epoch_of_reddit_holds_every_row_with_its_labels(schema):
    config = reddit(schema, sequence_length=1024)
    check_data(config, num_replicas=3, vocab_size=128_002)
    inputs, other = reddit_rows(schema, "train")
    if schema == "readme_schema":
        assert other.all()
        other = np.pad(inputs[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
    expected = sorted(map(tuple, np.concatenate([inputs, other], axis=1).tolist()))
    found = []
    for replica in range(3):
        stream = train_stream(config, None, replica=replica, num_replicas=3, seed=0)
        for _ in range(62):  # 744 rows / 3 replicas / 4 sequences
            batch = next(stream)
            found += np.concatenate([batch["input_ids"], batch["labels"]], axis=1).tolist()
    assert sorted(map(tuple, found)) == expected
