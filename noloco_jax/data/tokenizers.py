"""Tokenizers: the bytes of the text, or any fast tokenizer that `transformers` can load."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from noloco_jax.errors import TransientError, UserError
from noloco_jax.storage.addresses import local_folder

_TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt")
_ANSWER_SECONDS = 3.0  # timeout of the Hugging Face hub

# Cases, accents in both forms, digits, spaces, line ends, and scripts without spaces and beyond 16 bits.
_PROBE = (
    " The quick  Brown fox's caf\u00e9 cafe\u0301\n\tjumps, 1234567890 3.14!\r\n "
    "\u65e5\u672c \u0440\u0443 \ufb01\U0001f98a <s> "
)


class Tokenizer(Protocol):
    """Interface of a tokenizer to the data pipeline and text generation.

    Attributes:
      vocab_size: the smallest vocabulary that a model may have: one more than the largest id of a text, BOS or EOS.
      fingerprint: a digest that differs for tokenizers that make other ids of a text, whatever their names.
    """

    name: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    fingerprint: str

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of the text without special tokens: int32 (n,)."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return `encode` of each text, on all cores where the tokenizer can."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids`, without special tokens."""
        ...


class ByteTokenizer:
    """The 256 bytes of UTF-8, then BOS 256, EOS 257 and padding 258."""

    name = "byte"
    fingerprint = "byte"
    vocab_size = 259
    bos_id: int | None = 256
    eos_id: int | None = 257

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        ids = np.asarray(ids, np.int64)
        return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", "replace")


def makes_same_ids(first: Tokenizer, second: Tokenizer) -> bool:
    """Return True if two tokenizers make the same ids of a text that exercises splitting and normalization."""
    return first.encode(_PROBE).tolist() == second.encode(_PROBE).tolist()


class FastTokenizer:
    """A Hugging Face `tokenizers.Tokenizer` with the BOS and EOS ids that `transformers` has for it.

    Special tokens that are written out in a document are encoded as ordinary text: only the data pipeline marks where
    documents begin and end, and no id outside `vocab_size` can come from a text (Llama 3 reserves 254 such ids).
    """

    def __init__(self, name: str, backend: Any, vocab_size: int, bos_id: int | None, eos_id: int | None):
        self.name, self.vocab_size, self.bos_id, self.eos_id = name, vocab_size, bos_id, eos_id
        self._backend = backend
        self._configure()
        # Not of the tokenizer's file, which libraries of other versions write in other forms.
        vocabulary = sorted(backend.get_vocab(with_added_tokens=True).items())
        facts = [vocabulary, bos_id, eos_id, self.encode(_PROBE).tolist()]
        self.fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def _configure(self) -> None:
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._configure()  # pickling loses these settings

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:  # a lone surrogate, which JSON can write and UTF-8 cannot
            valid = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
            encodings = self._backend.encode_batch_fast(valid, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._backend.decode(np.asarray(ids).tolist(), skip_special_tokens=True)


def load_tokenizer(name: str, field: str = "data.tokenizer") -> Tokenizer:
    """Load the tokenizer `name`: "byte", a folder, here or at an address, or a name on the Hugging Face hub.

    A gated one is fetched with the token in the environment variable HF_TOKEN. Where the hub does not answer, what was
    fetched before is taken. `field` is the field or flag that names it, for error messages.
    Raises `UserError` if it cannot be loaded, `TransientError` if that is for want of the hub.
    """
    if name == "byte":
        return ByteTokenizer()
    folder = Path(name).expanduser()
    if (folder.is_absolute() or name.startswith((".", "~"))) and not folder.is_dir():
        raise UserError(
            f"{field}={name!r}: there is no such folder; give one with a tokenizer.json, "
            'a name on the Hugging Face hub, or "byte"'
        )
    with local_tokenizer(name) as given:
        return _load(name, given, field)


def copy_tokenizer(name: str, folder: Path) -> None:
    """Copy a tokenizer's folder, here or at an address, to `folder`, whole or not at all; nothing for other names."""
    if name == "byte":
        return
    with local_tokenizer(name) as given:
        if not Path(given).is_dir():
            return
        unfinished = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for file in Path(given).iterdir():
            if file.is_file() and file.name.endswith(_TOKENIZER_SUFFIXES):
                shutil.copyfile(file, unfinished / file.name)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)


@contextlib.contextmanager
def local_tokenizer(name: str) -> Iterator[str]:
    """Yield what `transformers` loads a tokenizer by: its name on the hub, its folder, or a copy of one at an address.

    Raises `UserError` if there is no folder at the address.
    """
    with local_folder(name, _TOKENIZER_SUFFIXES) as folder:
        yield str(folder) if folder.is_dir() else name


def _load(name: str, given: str, field: str) -> FastTokenizer:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # silences its warning that PyTorch is missing
    from transformers import AutoTokenizer

    unreachable = "" if Path(given).is_dir() else _unreachable_hub()
    try:
        loaded = AutoTokenizer.from_pretrained(
            given,
            token=os.environ.get("HF_TOKEN"),
            use_fast=True,
            local_files_only=bool(unreachable),
        )
    except Exception as error:  # the many backends of transformers raise all kinds
        if unreachable:
            raise TransientError(
                f"{field}={name!r} was not fetched before and {unreachable}: try again with a network, or give "
                'a local folder with a tokenizer.json, or "byte"'
            ) from None
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{field}={name!r} cannot be loaded ({type(error).__name__}: {reason}): set HF_TOKEN if its licence "
            'asks for a login, or give a local folder with a tokenizer.json, or "byte"'
        ) from None
    return fast_tokenizer(name, loaded, field)


def fast_tokenizer(name: str, loaded: Any, field: str = "data.tokenizer") -> FastTokenizer:
    """Make the tokenizer `name` of what `transformers` has loaded; raise `UserError` if that is no fast tokenizer.

    The two share the backend, in which special tokens become ordinary text.
    """
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise UserError(
            f"{field}={name!r} is a {type(loaded).__name__} without a tokenizer.json: "
            "give the folder of a fast tokenizer"
        )
    bos_id, eos_id = loaded.bos_token_id, loaded.eos_token_id
    ordinary = [index for index, token in loaded.added_tokens_decoder.items() if not token.special]
    # The largest id, not the number of ids: a vocabulary may have holes.
    ids = backend.get_vocab(with_added_tokens=False).values()
    largest = max([*ids, *ordinary, *(index for index in (bos_id, eos_id) if index is not None)])
    return FastTokenizer(name, backend, largest + 1, bos_id, eos_id)


def _unreachable_hub() -> str:
    """Return the reason why the Hugging Face hub does not answer, or "". Its own client retries for a minute, aloud."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:  # its own client says so
        return ""
    try:
        get_session().head(constants.ENDPOINT, timeout=_ANSWER_SECONDS)
    except Exception as error:  # its HTTP library has errors of its own
        return f"{constants.ENDPOINT} does not answer ({' '.join(str(error).split()) or type(error).__name__})"
    return ""


def check_vocabulary(tokenizer: Tokenizer, model_vocab_size: int) -> None:
    """Raise `UserError` where the model has no embedding for some of the tokenizer's ids."""
    if tokenizer.vocab_size > model_vocab_size:
        raise UserError(
            f"model.vocab_size={model_vocab_size} is smaller than the {tokenizer.vocab_size} ids of "
            f"data.tokenizer={tokenizer.name!r}: set model.vocab_size to at least {tokenizer.vocab_size}"
        )


class DocumentEncoder:
    """Encoder of documents for a stream: BOS if `add_bos`, the text's ids, EOS if `add_eos`; int32 (1, n) each.

    An empty text becomes no token at all. Raises `UserError` for a BOS or EOS that the tokenizer does not have, and for
    ids that are not below `vocab_size`, the model's; None leaves them unchecked.
    """

    def __init__(self, tokenizer: Tokenizer, *, add_bos: bool, add_eos: bool, vocab_size: int | None):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        for which, wanted, index in (("bos", add_bos, tokenizer.bos_id), ("eos", add_eos, tokenizer.eos_id)):
            if wanted and index is None:
                raise UserError(
                    f"data.add_{which}=True, but data.tokenizer={tokenizer.name!r} has no {which.upper()} token: "
                    f"set data.add_{which}=False"
                )
        self._before: Sequence[Any] = [tokenizer.bos_id] * add_bos
        self._after: Sequence[Any] = [tokenizer.eos_id] * add_eos

    def _check(self, ids: np.ndarray) -> None:
        if self._vocab_size is None or not len(ids):
            return
        smallest, largest = int(ids.min()), int(ids.max())
        if smallest < 0 or largest >= self._vocab_size:
            raise UserError(
                f"data.tokenizer={self._tokenizer.name!r} makes the token id {largest if smallest >= 0 else smallest}, "
                f"and ids are from 0 to below model.vocab_size={self._vocab_size}: give the model's own tokenizer, or "
                "raise model.vocab_size"
            )

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        arrays = []
        for text, ids in zip(texts, self._tokenizer.encode_batch(texts), strict=True):
            self._check(ids)
            document = np.concatenate([self._before, ids, self._after], dtype=np.int32, casting="unsafe")
            arrays.append((document if text else document[:0])[None])
        return arrays
