"""Tokenizer files of an exported model, from which `transformers.AutoTokenizer` makes the token ids of training."""

import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noloco_jax.errors import UserError
from noloco_jax.model.byte_tokenizer import begin_with_bos, save_byte_tokenizer
from noloco_jax.model.huggingface_config import read_json

if TYPE_CHECKING:
    from noloco_jax.data import Tokenizer

_CONFIG_FILE = "tokenizer_config.json"
# AutoTokenizer of transformers 5 loads these model types' tokenizers with this class, whatever `tokenizer_class` says.
# The class takes the vocabulary alone from tokenizer.json: the normalizer and the pre-tokenizer are its own.
_FORCED_CLASSES = {"qwen2": "Qwen2Tokenizer"}

_MODULE, _CLASS = "tokenization_from_file", "TokenizerFromFile"
_CODE = f'''"""The tokenizer of this folder's tokenizer.json, for AutoTokenizer with trust_remote_code=True."""

from transformers import PreTrainedTokenizerFast


class {_CLASS}(PreTrainedTokenizerFast):
    """A tokenizer that is tokenizer.json unchanged; without trust_remote_code its base class is the same."""
'''


def save_tokenizer(name: str, folder: Path, *, model_type: str, add_bos: bool) -> None:
    """Write a tokenizer beside a model's config.json; warn if `transformers` makes other token ids from the files.

    Args:
      name: a tokenizer's folder, its name on the hub or "byte", for `transformers.AutoTokenizer`.
      folder: where to; its config.json is there already, as AutoTokenizer reads it too.
      model_type: the model's, in `transformers`.
      add_bos: let it put BOS in front of a text, as the model's documents had it.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would regret that there is no PyTorch
    from noloco_jax.data.tokenizers import ByteTokenizer, fast_tokenizer, local_tokenizer

    trained: Tokenizer
    if name == ByteTokenizer.name:
        trained = ByteTokenizer()
        save_byte_tokenizer(folder, add_bos=add_bos)
    else:
        from transformers import AutoTokenizer

        with local_tokenizer(name) as given:
            loaded = AutoTokenizer.from_pretrained(given, token=os.environ.get("HF_TOKEN"))
        if add_bos and loaded.bos_token is not None:
            begin_with_bos(loaded.backend_tokenizer, loaded.bos_token)
        loaded.save_pretrained(folder)
        trained = fast_tokenizer(name, loaded)
    _name_as_before_5(folder)
    if not _is_loaded_unchanged(folder, model_type) or not _is_read_back(trained, folder):
        _load_file_unchanged(folder)
        if not _is_read_back(trained, folder):
            warnings.warn(
                f"AutoTokenizer makes other token ids from the exported tokenizer than data.tokenizer={name!r}, on "
                f"which the model was trained: its tokenizer for model_type={model_type!r} is not the exported "
                "tokenizer.json. Load that by PreTrainedTokenizerFast.from_pretrained, and give "
                f"--tokenizer={name} to commands that take this folder as --model",
                stacklevel=3,
            )


def _name_as_before_5(folder: Path) -> None:
    """Rename what versions of `transformers` before 5 cannot load; version 5 reads both names.

    It saves a fast tokenizer under a class that they lack, and further special tokens as a list where they want a dict.
    """
    saved = read_json(folder / _CONFIG_FILE)
    if saved.get("tokenizer_class") == "TokenizersBackend":
        saved["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(saved.get("extra_special_tokens"), list):
        saved["additional_special_tokens"] = saved.pop("extra_special_tokens")
    _write_config(folder, saved)


def _is_loaded_unchanged(folder: Path, model_type: str) -> bool:
    """Return False where some version of `transformers` is known to load the saved tokenizer as another one.

    An `auto_map` comes from the given tokenizer and names code that is not saved with it.
    """
    saved = read_json(folder / _CONFIG_FILE)
    own_class = saved.get("tokenizer_class", "").removesuffix("Fast")
    return "auto_map" not in saved and own_class == _FORCED_CLASSES.get(model_type, own_class)


def _is_read_back(trained: "Tokenizer", folder: Path) -> bool:
    from noloco_jax.data.tokenizers import load_tokenizer, makes_same_ids

    try:
        return makes_same_ids(trained, load_tokenizer(str(folder)))
    except UserError:  # not loaded at all, which needs the same advice
        return False


def _load_file_unchanged(folder: Path) -> None:
    """Let AutoTokenizer load tokenizer.json as it is, whatever the model's type.

    An entry in `auto_map` is a tokenizer of one's own to AutoTokenizer, which then leaves the class of the model's type
    aside. It runs the code that the entry names with trust_remote_code=True, and follows `tokenizer_class` without.
    `PreTrainedTokenizerFast` is known to all versions.
    """
    # The first place is for use_fast=False, in versions before 5.
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "auto_map": {"AutoTokenizer": [f"{_MODULE}.{_CLASS}"] * 2}}
    _write_config(folder, read_json(folder / _CONFIG_FILE) | own)
    (folder / f"{_MODULE}.py").write_text(_CODE, encoding="utf-8")


def _write_config(folder: Path, values: dict[str, Any]) -> None:
    (folder / _CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
