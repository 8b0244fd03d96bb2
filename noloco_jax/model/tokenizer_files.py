"""Tokenizer files of an exported model, from which `transformers.AutoTokenizer` makes the token ids of training.

The tokenizer of bytes is written in Hugging Face's form.
"""

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noloco_jax.data import FastTokenizer, Tokenizer, makes_same_ids
from noloco_jax.data.tokenizers import of_transformers, text_of
from noloco_jax.errors import described

if TYPE_CHECKING:
    import tokenizers

# The class that loads tokenizer.json as it is, by the name that every version of `transformers` knows.
_OF_FILE = "PreTrainedTokenizerFast"
# Of a given tokenizer_config.json, beside the special tokens. Other entries make some version rebuild the tokenizer.
_KEPT_SETTINGS = ("chat_template", "model_max_length", "padding_side")
_BOS, _EOS, _PAD = SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>")  # 256, 257, 258, as `data.ByteTokenizer` numbers them
BYTE_SETTINGS = {"bos_token": _BOS, "eos_token": _EOS, "pad_token": _PAD}


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, add_bos: bool) -> None:
    """Write a tokenizer beside a model's config.json; warn if `transformers` makes other token ids from the files.

    Args:
      tokenizer: the tokenizer of training.
      folder: where to; its config.json is there already, as AutoTokenizer reads it too.
      add_bos: let it put BOS in front of a text, as the model's documents had it.
    """
    import tokenizers

    if isinstance(tokenizer, FastTokenizer):
        backend, settings = tokenizers.Tokenizer.from_str(tokenizer.to_json()), tokenizer.settings
    else:
        backend, settings = byte_backend(), BYTE_SETTINGS
    if add_bos and tokenizer.bos_id is not None:
        begin_with_bos(backend, tokenizer.bos_id)
    backend.save(str(folder / "tokenizer.json"))
    entries = _config_entries(backend, tokenizer, settings) | {"tokenizer_class": _OF_FILE}
    (folder / "tokenizer_config.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    if loaded_as := _class_of_other_ids(tokenizer, folder):
        warnings.warn(
            f"AutoTokenizer loads the exported tokenizer as {loaded_as}, which makes other token ids than "
            f"data.tokenizer={tokenizer.name!r}, on which the model was trained: load it by "
            f"{_OF_FILE}.from_pretrained instead",
            stacklevel=3,
        )


def _config_entries(backend: Any, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of tokenizer_config.json, in names that versions 4 and 5 of `transformers` read.

    A special token that tokenizer.json lacks is left out, as `transformers` would give it an id beyond the vocabulary.
    """
    kept = {name: settings[name] for name in _KEPT_SETTINGS if settings.get(name) is not None}
    special = {
        name: text_of(token)
        for name, token in settings.items()
        if name.endswith("_token") and not name.startswith("add_")
    }
    special |= {
        name: backend.id_to_token(index)
        for name, index in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id))
        if index is not None
    }
    kept |= {name: token for name, token in special.items() if token and backend.token_to_id(token) is not None}
    # Version 5 calls the list extra_special_tokens, by which version 4 means a dict.
    further = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    texts = [text for token in further if (text := text_of(token)) and backend.token_to_id(text) is not None]
    pre_tokenizer = json.loads(backend.to_str())["pre_tokenizer"] or {}
    if "add_prefix_space" in pre_tokenizer:  # version 4 takes its absence for False, and changes the tokenizer
        kept["add_prefix_space"] = pre_tokenizer["add_prefix_space"]
    inputs = ["input_ids", "attention_mask"]  # the class has token types too, which these models do not take
    kept |= {"additional_special_tokens": texts} if texts else {}
    return kept | {"clean_up_tokenization_spaces": False, "model_input_names": inputs}


def _class_of_other_ids(trained: Tokenizer, folder: Path) -> str:
    """Return the class that AutoTokenizer loads, "" where that makes the ids of training, BOS and EOS included."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would regret that there is no PyTorch
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(folder)
        loaded = of_transformers(str(folder), theirs)
    except Exception as error:  # of any kind; it needs the same advice
        return f"nothing ({described(error)[:100]})"
    ends_are_same = (loaded.bos_id, loaded.eos_id) == (trained.bos_id, trained.eos_id)
    return "" if ends_are_same and makes_same_ids(trained, loaded) else type(theirs).__name__


def byte_backend() -> "tokenizers.Tokenizer":
    """Make the tokenizer: the bytes of UTF-8, each its own id, then the special tokens.

    Unlike in training, a special token that is written out in a text is that token.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    backend = Tokenizer(BPE(vocab={letter: byte for byte, letter in enumerate(_letters())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return backend


def begin_with_bos(backend: "tokenizers.Tokenizer", number: int) -> None:
    """Make a tokenizer put BOS in front of a text, after its own post-processor, unless that does it already.

    Args:
      backend: the tokenizer.
      number: the id of BOS.
    """
    from tokenizers import processors

    if backend.encode("").ids[:1] == [number]:
        return
    bos = backend.id_to_token(number)
    with_bos = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, number)])
    own = backend.post_processor
    backend.post_processor = with_bos if own is None else processors.Sequence([own, with_bos])


def _letters() -> list[str]:
    """Return the letter that byte-level tokenizers write for each byte: itself if printable, else from U+0100 on."""
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]
