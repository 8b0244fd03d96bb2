"""Tokenizers: the bytes of the text, or a Hugging Face one from a folder, an address or the hub.

The `tokenizers` library reads a tokenizer.json. `transformers` reads folders without one: its AutoTokenizer takes the
vocabulary alone from a tokenizer.json and rebuilds the rest by `tokenizer_class` or `model_type`, so that ids differ.
"""

import functools
import hashlib
import json
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from noloco_jax.errors import TransientError, UserError
from noloco_jax.storage import local_folder

if TYPE_CHECKING:
    import tokenizers

# Words, contractions, accents in both forms, digits, spaces, line ends, code, and scripts without spaces and beyond 16
# bits: whatever normalizers and pre-tokenizers treat in different ways.
_PIECES = (
    *("the", " The", " quick", "  Brown", " fox's", " I'LL", "n't", " don\u2019t", "CamelCase", "_x_", "def f(x):\n  "),
    *("\u00c4\u00d6", " caf\u00e9", " cafe\u0301", "na\u00efve", " \ufb01n", "\u00bd", "\u2168", "\u65e5\u672c\u8a9e"),
    *("1", "12", "1234567", " 3.14", " 2024", "$5", ",", ".", "!?", "...", " \u2014 ", "(a)", "\u3002", "http://a.b/c"),
    *(" ", "   ", "\n", "\n\n", " \n  ", "\t", "\r\n", "\u00a0", "\u200b", "\u2581", "<s>", "</s>", " \u0440\u0443"),
    *("\u0627\u0644", "\ud55c\uad6d", "\u0939\u093f", "\U0001f98a", "\U0001f468\u200d\U0001f469"),
)
_FILE = "tokenizer.json"
_READ_FILES = (_FILE, "tokenizer_config.json", "special_tokens_map.json", "config.json", "chat_template.jinja")
_TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt")
_ANSWER_SECONDS = 3.0  # timeout of the Hugging Face hub


@functools.cache
def _probe() -> list[str]:
    """Return 200 texts of random pieces, the same ones everywhere; the first has every piece."""
    rng = random.Random(0)  # of which only `random()` is the same in all versions of Python
    texts = ["".join(_PIECES[int(rng.random() * len(_PIECES))] for _ in range(12)) for _ in range(199)]
    return ["".join(_PIECES), *texts]


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
    """Return True if two tokenizers make the same ids of 200 texts that exercise splitting and normalization."""
    pairs = zip(first.encode_batch(_probe()), second.encode_batch(_probe()), strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


class FastTokenizer:
    """A `tokenizers.Tokenizer`, which makes the ids of its tokenizer.json.

    Special tokens that are written out in a document are encoded as ordinary text: only the data pipeline marks where
    documents begin and end, and no id outside `vocab_size` can come from a text (Llama 3 reserves 254 such ids).

    Args:
      name: the name, folder or address of the tokenizer.
      backend: the tokenizer; this object owns it, and changes its settings.
      bos_id, eos_id: its ids for the begin and the end of a document; None: it has none.
      settings: entries of its tokenizer_config.json, for exports.
    """

    def __init__(
        self,
        name: str,
        backend: "tokenizers.Tokenizer",
        bos_id: int | None,
        eos_id: int | None,
        settings: Mapping[str, Any] | None = None,
    ):
        self.name, self.bos_id, self.eos_id, self.settings = name, bos_id, eos_id, settings or {}
        self._backend = backend
        self._configure()
        ordinary = [index for index, token in backend.get_added_tokens_decoder().items() if not token.special]
        # The largest id, not the number of ids: a vocabulary may have holes.
        ids = backend.get_vocab(with_added_tokens=False).values()
        self.vocab_size = 1 + max([*ids, *ordinary, *(index for index in (bos_id, eos_id) if index is not None)])
        # Not of the tokenizer's file, which libraries of other versions write in other forms.
        vocabulary = sorted(backend.get_vocab(with_added_tokens=True).items())
        facts = [vocabulary, bos_id, eos_id, [ids.tolist() for ids in self.encode_batch(_probe())]]
        self.fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Return the content of a tokenizer.json."""
        return self._backend.to_str()

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
                    f"name a token of its vocabulary as {which}_token in tokenizer_config.json, or set "
                    f"data.add_{which}=False"
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


def load_tokenizer(name: str, field: str = "data.tokenizer") -> Tokenizer:
    """Load the tokenizer `name`: "byte", a folder, here or at an address, or a name on the Hugging Face hub.

    A gated one is fetched with the token in the environment variable HF_TOKEN. Where the hub does not answer, what was
    fetched before is taken. `field` is the field or flag that names it, for error messages.
    Raises `UserError` if it cannot be loaded, `TransientError` if that is for want of the hub.
    """
    if name == "byte":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if (path.is_absolute() or name.startswith((".", "~"))) and not path.is_dir():
        raise UserError(
            f"{field}={name!r}: there is no such folder; give one with a tokenizer.json, "
            'a name on the Hugging Face hub, or "byte"'
        )
    unreachable = ""
    try:
        with local_folder(name, _TOKENIZER_SUFFIXES) as folder:
            if folder.is_dir():
                return _from_file(name, folder) or _from_transformers(name, str(folder), field)
        unreachable = _unreachable_hub()
        return _from_hub(name, field, cached=bool(unreachable))
    except UserError:
        raise
    except Exception as error:  # the backends of transformers and the hub's client raise all kinds
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


def copy_tokenizer(name: str, folder: Path) -> None:
    """Copy a tokenizer's folder, here or at an address, to `folder`, whole or not at all; nothing for other names."""
    if name == "byte":
        return
    with local_folder(name, _TOKENIZER_SUFFIXES) as given:
        if not given.is_dir():
            return
        unfinished = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for file in given.iterdir():
            if file.is_file() and file.name.endswith(_TOKENIZER_SUFFIXES):
                shutil.copyfile(file, unfinished / file.name)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)


def _from_file(name: str, folder: Path) -> FastTokenizer | None:
    """Read a folder's tokenizer.json; None if it has none."""
    if not (folder / _FILE).is_file():
        return None
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(folder / _FILE))
    settings, model = _settings(folder), _json_entries(folder / "config.json")
    bos_id, eos_id = (_special_id(backend, settings, model, which) for which in ("bos", "eos"))
    return FastTokenizer(name, backend, bos_id, eos_id, settings)


def _from_hub(name: str, field: str, *, cached: bool) -> FastTokenizer:
    """Load the tokenizer of a repository on the hub; `cached`: from files that were fetched before."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # the files are small
    folder = snapshot_download(name, allow_patterns=list(_READ_FILES), local_files_only=cached)
    if (found := _from_file(name, Path(folder))) is not None:
        return found
    # By its name, `transformers` would not find all files in the cache without a network.
    folder = snapshot_download(name, allow_patterns=[f"*{end}" for end in _TOKENIZER_SUFFIXES], local_files_only=cached)
    return _from_transformers(name, folder, field)


def _from_transformers(name: str, folder: str, field: str) -> FastTokenizer:
    """Load a tokenizer without a tokenizer.json.

    Raises:
      UserError: if `transformers` makes no fast tokenizer of it.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # silences its warning that PyTorch is missing
    from transformers import AutoTokenizer

    return of_transformers(name, AutoTokenizer.from_pretrained(folder), field)


def of_transformers(name: str, loaded: Any, field: str = "data.tokenizer") -> FastTokenizer:
    """Make the tokenizer `name` of what `transformers` has loaded; raise `UserError` if that is no fast tokenizer.

    The two share the backend, in which special tokens become ordinary text.
    """
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise UserError(
            f"{field}={name!r} is a {type(loaded).__name__} without a tokenizer.json: "
            "give the folder of a fast tokenizer"
        )
    return FastTokenizer(name, backend, loaded.bos_token_id, loaded.eos_token_id, loaded.special_tokens_map)


def _settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json and special_tokens_map.json as one, with the precedence of `transformers`."""
    settings = _json_entries(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:  # newer ones have it, and repeat the other file
        settings |= _json_entries(folder / "special_tokens_map.json")
    template = folder / "chat_template.jinja"
    return settings | ({"chat_template": template.read_text(encoding="utf-8")} if template.is_file() else {})


def _special_id(
    backend: "tokenizers.Tokenizer", settings: dict[str, Any], model: dict[str, Any], which: str
) -> int | None:
    """Return the id of BOS or EOS: of the token that `settings` name, else of the model's config.json (GPT-2)."""
    if (name := f"{which}_token") in settings:
        token = text_of(settings[name])
        return backend.token_to_id(token) if token else None
    index = model.get(f"{name}_id")
    token = backend.get_added_tokens_decoder().get(index) if type(index) is int else None
    return index if token is not None and token.special else None  # a default of its class is any token's


def text_of(token: Any) -> str | None:
    """Return the text of a special token, which files write as a text or as an object with "content"."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _json_entries(path: Path) -> dict[str, Any]:
    """Return the entries of a JSON file; empty for a missing file."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path.name} holds a {type(values).__name__}, not an object")
    return values


def _unreachable_hub() -> str:
    """Return why the Hugging Face hub does not answer, or "". Its own client would retry for a minute, and log it."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:  # its own client says so
        return ""
    try:
        get_session().head(constants.ENDPOINT, timeout=_ANSWER_SECONDS)
    except Exception as error:  # its HTTP library has errors of its own
        return f"{constants.ENDPOINT} does not answer ({' '.join(str(error).split()) or type(error).__name__})"
    return ""
