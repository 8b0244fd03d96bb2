"""The exported byte tokenizer, loaded by `AutoTokenizer`, against the one in training."""

import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from noloco_jax.data import ByteTokenizer, load_tokenizer
from noloco_jax.model.tokenizer_files import begin_with_bos, save_tokenizer


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(ByteTokenizer(), folder, add_bos=False)
    return AutoTokenizer.from_pretrained(folder)


def texts() -> list[str]:
    rng = random.Random(0)
    every = [chr(code) for code in (*range(0x250), *range(0x4E00, 0x4E40), *range(0x1F600, 0x1F640))]
    return [
        "",
        " a  b\r\n\tc ",
        "café \u65e5\u672c \U0001f98a",
        *("".join(rng.choices(every, k=60)) for _ in range(50)),
    ]


def test_ids_match_training_and_decode_to_the_text(loaded):
    for text in texts():
        ids = loaded(text)["input_ids"]
        assert ids == ByteTokenizer().encode(text).tolist()
        assert loaded.decode(ids) == text


def test_invalid_utf_8_decodes_as_in_training(loaded):
    rng = random.Random(1)
    for _ in range(50):
        ids = rng.choices(range(256), k=20)
        assert loaded.decode(ids) == ByteTokenizer().decode(ids)


def test_special_tokens_have_the_ids_of_training(loaded):
    ours = ByteTokenizer()
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (ours.bos_id, ours.eos_id, 258)
    assert len(loaded) == ours.vocab_size
    assert loaded.decode([256, 104, 105, 257], skip_special_tokens=True) == "hi"


def test_a_text_begins_with_bos_where_documents_did_in_training(tmp_path):
    save_tokenizer(ByteTokenizer(), tmp_path, add_bos=True)
    assert AutoTokenizer.from_pretrained(tmp_path)("hi")["input_ids"] == [256, 104, 105]
    assert load_tokenizer(str(tmp_path)).encode("hi").tolist() == [
        104,
        105,
    ]  # for data, which mark documents themselves


@pytest.mark.parametrize("own", [None, processors.ByteLevel(trim_offsets=False)])
def test_bos_is_put_in_front_once_whatever_a_tokenizer_does_by_itself(own):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>"])
    if own is not None:
        tokenizer.post_processor = own
    for _ in range(2):
        begin_with_bos(tokenizer, 2)
        assert tokenizer.encode("b a").ids == [2, 1, 0]
        assert tokenizer.encode("b a", add_special_tokens=False).ids == [1, 0]
