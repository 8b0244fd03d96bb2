"""Tokenizers from folders and the hub: the ids are those of tokenizer.json, whatever else lies beside it."""

import json
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from noloco_jax.data import load_tokenizer
from noloco_jax.errors import TransientError, UserError
from noloco_jax.model.tokenizer_files import byte_backend
from support.ports import free_port


def threes() -> Tokenizer:
    """Bytes and the pair "34", digits split by threes."""
    vocabulary = byte_backend().get_vocab(with_added_tokens=False) | {"34": 256}
    made = Tokenizer(BPE(vocab=vocabulary, merges=[("3", "4")]))
    split = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\P{N}+"), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return made


def composed() -> Tokenizer:
    made = byte_backend()
    made.normalizer = normalizers.NFC()
    return made


def metaspace() -> Tokenizer:
    made = Tokenizer(BPE(vocab={"\u2581": 0, "a": 1, "b": 2}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


def write(folder: Path, made: Tokenizer, **files: dict) -> str:
    made.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize(
    ("of_class", "model_type"), [(None, "qwen2"), ("GPT2Tokenizer", None), ("LlamaTokenizerFast", "llama")]
)
@pytest.mark.parametrize(
    ("make", "text", "ids"),
    [(threes, "12345", [*b"12345"]), (composed, "e\u0301", [0xC3, 0xA9]), (metaspace, "a b", [0, 1, 0, 2])],
)
def test_the_file_decides_whatever_class_and_model_lie_beside_it(make, text, ids, of_class, model_type, tmp_path):
    beside = {} if of_class is None else {"tokenizer_config": {"tokenizer_class": of_class}}
    beside |= {} if model_type is None else {"config": {"model_type": model_type}}
    assert load_tokenizer(write(tmp_path, make(), **beside)).encode(text).tolist() == ids


def test_a_folder_with_a_file_imports_no_transformers(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it fails
    load_tokenizer(write(tmp_path, threes()))


@pytest.mark.parametrize(
    ("files", "bos_id"),
    [
        ({"tokenizer_config": {"bos_token": "<s>"}}, 256),
        ({"tokenizer_config": {"bos_token": {"content": "<s>", "lstrip": False}}}, 256),
        ({"tokenizer_config": {"bos_token": None}, "config": {"bos_token_id": 256}}, None),
        ({"tokenizer_config": {"bos_token": ""}}, None),
        ({"tokenizer_config": {"bos_token": "<not in the file>"}}, None),
        ({"special_tokens_map": {"bos_token": {"content": "<s>"}}}, 256),
        ({"tokenizer_config": {"bos_token": "<t>"}, "special_tokens_map": {"bos_token": "<s>"}}, 256),
        (
            {
                "tokenizer_config": {"bos_token": "<t>", "added_tokens_decoder": {}},
                "special_tokens_map": {"bos_token": "<s>"},
            },
            257,
        ),
        ({"config": {"bos_token_id": 256}}, 256),
        ({"config": {"bos_token_id": 1}}, None),
        ({}, None),
    ],
)
def test_bos_is_the_token_that_the_files_name(files, bos_id, tmp_path):
    made = Tokenizer(BPE(vocab=byte_backend().get_vocab(with_added_tokens=False), merges=[]))
    made.add_special_tokens([AddedToken("<s>"), AddedToken("<t>")])
    assert load_tokenizer(write(tmp_path, made, **files)).bos_id == bos_id


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "~/nothing-of-this-name"])
def test_a_missing_tokenizer_folder_is_refused(name):
    with pytest.raises(UserError, match=r"there is no such folder; .*tokenizer.json"):
        load_tokenizer(name)


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=r"cannot be loaded .*local folder") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_an_unknown_name_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"'nobody/nothing' cannot be loaded .*set HF_TOKEN") as caught:
        load_tokenizer("nobody/nothing")
    assert "\n" not in str(caught.value)


@pytest.fixture
def no_hub(monkeypatch):
    """Point the Hub client at a port where nothing listens."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def test_an_unreachable_hub_is_not_asked_again_and_ends_in_one_line(no_hub, capfd):
    with pytest.raises(TransientError, match=r"'nobody/nothing' was not fetched before and http.* answer") as caught:
        load_tokenizer("nobody/nothing")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")  # the hub's own client retries for a minute, aloud


def test_an_unreachable_hub_falls_back_to_the_local_cache(no_hub, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--somebody--something"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("0" * 40)
    (repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
    write(repository / "snapshots" / ("0" * 40), threes())
    assert load_tokenizer("somebody/something").encode("12345").tolist() == [*b"12345"]


def without_file(folder: Path) -> None:
    """Write the bytes and the pair "34" in the files of GPT-2."""
    vocabulary = byte_backend().get_vocab(with_added_tokens=False) | {"34": 256, "<|endoftext|>": 257}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n3 4\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))


def test_a_folder_without_a_tokenizer_json_is_loaded_by_transformers(tmp_path):
    without_file(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert (loaded.encode("1342").tolist(), loaded.bos_id, loaded.vocab_size) == ([49, 256, 50], 257, 258)


@pytest.mark.parametrize("fill", [lambda folder: write(folder, threes()), without_file], ids=["file", "no file"])
def test_of_a_repository_no_more_is_fetched_than_the_tokenizer_needs(fill, tmp_path, monkeypatch):
    fetched = []

    def snapshot_download(name, allow_patterns, local_files_only):
        fetched.append((name, *allow_patterns, local_files_only))
        return str(tmp_path)

    fill(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("noloco_jax.data.tokenizers._unreachable_hub", lambda: "")
    assert load_tokenizer("somebody/something").encode("1").tolist() == [49]
    first, *more = fetched
    assert first[:2] == ("somebody/something", "tokenizer.json") and not first[-1]
    assert (more == []) == (tmp_path / "tokenizer.json").exists()
    assert not any(pattern in ("*", "*.safetensors", "*.bin") for call in fetched for pattern in call)


def test_a_damaged_file_beside_the_tokenizer_is_named(tmp_path):
    folder = write(tmp_path, threes())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"cannot be loaded \(ValueError: tokenizer_config\.json is not JSON"):
        load_tokenizer(folder)
