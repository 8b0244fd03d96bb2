"""Tokenizers: bytes by definition, Hugging Face ones against `transformers` itself."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from noloco_jax.data import check_vocabulary, load_tokenizer
from noloco_jax.data.tokenizers import DocumentEncoder
from noloco_jax.errors import UserError
from support.paths import SHARED

TEXTS = ["Plain words, and some more.", "  déjà vu — 漢字 🙂\n\n\tx", "a", "The end\n"]


@pytest.fixture(params=["c4_bpe_4096", "mistral_v1"])
def folder(request):
    path = SHARED / "data" / "tokenizers" / request.param
    if not path.is_dir():
        pytest.skip("needs ../shared/data/tokenizers")
    return str(path)


def word_tokenizer(folder: Path, *, special: dict[str, str], added: list[str]) -> str:
    """Write a tokenizer of the words "a" and "b", then `special` and `added` tokens; return its folder."""
    names = [*special.values(), *added]
    tokens = [
        {"id": 3 + k, "content": name, "special": name in special.values(), "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for k, name in enumerate(names)
    ]
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "b": 2}, "unk_token": "[UNK]"}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    split = {"type": "Whitespace"}
    content = {"version": "1.0", "added_tokens": tokens, "pre_tokenizer": split, "model": model} | nothing
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | special))
    return str(folder)


def test_ids_are_those_of_transformers(folder):
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    expected = [theirs(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert [ids.tolist() for ids in ours.encode_batch(TEXTS)] == expected
    assert [ours.encode(text).tolist() for text in TEXTS] == expected
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    assert ours.encode("x").dtype == np.int32


def test_decoding_gives_the_text_back(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.bos_id is not None
    for text in map(str.lstrip, TEXTS):  # SentencePiece takes a leading space for its own
        assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode(text)]) == text


def test_special_tokens_in_a_text_are_ordinary_text_also_after_pickling(folder):
    tokenizer = load_tokenizer(folder)
    text = "<s> a <|end_of_text|>"
    for one in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        ids = one.encode(text)
        assert not {one.bos_id, one.eos_id} & set(ids.tolist())
        assert one.decode(ids) == text


def test_a_lone_surrogate_is_encoded_like_a_question_mark(folder):
    for tokenizer in (load_tokenizer(folder), load_tokenizer("byte")):
        np.testing.assert_array_equal(tokenizer.encode("a\ud800b"), tokenizer.encode("a?b"))


def test_reserved_special_tokens_need_no_embedding_but_added_words_do(tmp_path):
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "reserved").mkdir()
    (tmp_path / "added").mkdir()
    reserved = load_tokenizer(
        word_tokenizer(tmp_path / "reserved", special=special | {"pad_token": "<p>", "cls_token": "<c>"}, added=[])
    )
    added = load_tokenizer(word_tokenizer(tmp_path / "added", special=special, added=["ab"]))
    assert (reserved.bos_id, reserved.eos_id, reserved.vocab_size) == (3, 4, 5)
    assert reserved.encode("a <c> b").max() < 5
    assert (added.vocab_size, added.encode("a ab b").tolist()) == (6, [1, 5, 2])


def test_documents_are_encoded_with_the_configured_special_tokens():
    tokenizer = load_tokenizer("byte")
    for bos, eos in [(True, True), (True, False), (False, True), (False, False)]:
        encode = DocumentEncoder(tokenizer, add_bos=bos, add_eos=eos, vocab_size=259)
        one, empty = encode(["hi", ""])
        assert one.tolist() == [[256] * bos + [104, 105] + [257] * eos]
        assert empty.shape == (1, 0)


def test_a_special_token_that_the_tokenizer_lacks_is_refused(tmp_path):
    tokenizer = load_tokenizer(word_tokenizer(tmp_path, special={"bos_token": "<s>"}, added=[]))
    DocumentEncoder(tokenizer, add_bos=True, add_eos=False, vocab_size=None)
    with pytest.raises(UserError, match=r"has no EOS token: name .* as eos_token in .*, or set data\.add_eos=False"):
        DocumentEncoder(tokenizer, add_bos=True, add_eos=True, vocab_size=None)


def test_an_id_outside_the_vocabulary_is_refused_where_the_text_is_read():
    encode = DocumentEncoder(load_tokenizer("byte"), add_bos=False, add_eos=False, vocab_size=100)
    encode(["abc"[:2]])
    with pytest.raises(UserError, match=r"'byte' makes the token id 122, .* below model\.vocab_size=100"):
        encode(["abc", "xyz"])


def test_the_size_of_a_vocabulary_with_holes_is_that_of_its_largest_id(tmp_path):
    folder = Path(word_tokenizer(tmp_path, special={"bos_token": "<s>", "eos_token": "</s>"}, added=[]))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["b"] = 5356
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.encode("b").tolist() == [5356]
    with pytest.raises(UserError, match=r"model\.vocab_size=4096 .* 5357 ids"):
        check_vocabulary(tokenizer, 4096)


def test_a_fingerprint_depends_on_the_tokens_but_not_on_the_name(tmp_path):
    def fingerprint(name: str, *, bos: str = "<s>", added: str = "x") -> str:
        (tmp_path / name).mkdir()
        return load_tokenizer(
            word_tokenizer(tmp_path / name, special={"bos_token": bos, "eos_token": "</s>"}, added=[added])
        ).fingerprint

    one = fingerprint("one")
    assert fingerprint("same") == one
    assert len({one, fingerprint("other_word", added="y"), fingerprint("other_bos", bos="<b>"), "byte"}) == 4
