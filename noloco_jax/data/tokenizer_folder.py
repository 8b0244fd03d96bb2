"""Tokenizers from folders, addresses and the Hugging Face hub.

The `tokenizers` library reads a tokenizer.json. `transformers` reads what has none: its AutoTokenizer takes the
vocabulary alone from a tokenizer.json and rebuilds the rest by `tokenizer_class` or `model_type`, so that ids differ.
"""

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noloco_jax.data.tokenizers import ByteTokenizer, FastTokenizer, Tokenizer
from noloco_jax.errors import TransientError, UserError
from noloco_jax.storage.addresses import local_folder

if TYPE_CHECKING:
    import tokenizers

_FILE = "tokenizer.json"
_READ_FILES = (_FILE, "tokenizer_config.json", "special_tokens_map.json", "config.json", "chat_template.jinja")
_SUFFIXES = (".json", ".jinja", ".model", ".txt")
_ANSWER_SECONDS = 3.0  # timeout of the Hugging Face hub


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
        with local_folder(name, _SUFFIXES) as folder:
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
    with local_folder(name, _SUFFIXES) as given:
        if not given.is_dir():
            return
        unfinished = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for file in given.iterdir():
            if file.is_file() and file.name.endswith(_SUFFIXES):
                shutil.copyfile(file, unfinished / file.name)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)


def _from_file(name: str, folder: Path) -> FastTokenizer | None:
    """Read a folder's tokenizer.json; None if it has none."""
    if not (folder / _FILE).is_file():
        return None
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(folder / _FILE))
    settings, model = _settings(folder), _read(folder / "config.json")
    bos_id, eos_id = (_special_id(backend, settings, model, which) for which in ("bos", "eos"))
    return FastTokenizer(name, backend, bos_id, eos_id, settings)


def _from_hub(name: str, field: str, *, cached: bool) -> FastTokenizer:
    """Load the tokenizer of a repository, of what was fetched before if `cached`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # the files are small
    folder = snapshot_download(name, allow_patterns=list(_READ_FILES), local_files_only=cached)
    if (found := _from_file(name, Path(folder))) is not None:
        return found
    # By its name, `transformers` would not find all files in the cache without a network.
    folder = snapshot_download(name, allow_patterns=[f"*{end}" for end in _SUFFIXES], local_files_only=cached)
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
    settings = _read(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:  # newer ones have it, and repeat the other file
        settings |= _read(folder / "special_tokens_map.json")
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


def _read(path: Path) -> dict[str, Any]:
    """Return the entries of a JSON file; none if it is not there."""
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
