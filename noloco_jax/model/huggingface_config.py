"""Hugging Face's config.json of a Llama, read into the model's fields and written from them."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from noloco_jax.config import ModelConfig
from noloco_jax.errors import UserError

CONFIG_FILE = "config.json"

# Ours -> theirs.
_CONFIG_NAMES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
# What their LlamaConfig takes for an entry that a config.json leaves out; num_key_value_heads: num_attention_heads.
_THEIR_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0}
_ROPE_SCALING_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def config_from_folder(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a folder's config.json into `ModelConfig` fields; dtype, param_dtype and remat are a run's own choice.

    The rotary settings may stand under `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`.
    Raises `UserError` where there is no config.json, or it describes another architecture than `model.llama` has.
    """
    path = Path(folder).expanduser() / CONFIG_FILE
    theirs = read_json(path)
    _check_architecture(path, theirs)
    fields = {}
    for ours, name in _CONFIG_NAMES.items():
        if name in theirs and theirs[name] is not None:
            fields[ours] = theirs[name]
        elif name == "num_key_value_heads":
            fields[ours] = theirs["num_attention_heads"]
        elif name in _THEIR_DEFAULTS:
            fields[ours] = _THEIR_DEFAULTS[name]
        else:
            raise UserError(f"{path} has no {name}: it does not describe a Llama, name another folder")
    head_dim = fields["hidden_size"] // fields["num_heads"]
    if theirs.get("head_dim") not in (None, head_dim):
        raise UserError(
            f"{path}: head_dim={theirs['head_dim']} is not hidden_size / num_attention_heads = {head_dim}: "
            "such a model cannot be imported"
        )
    return fields | _rope_fields(path, theirs)


def max_positions(folder: str | os.PathLike[str]) -> int | None:
    """Return the tokens of the longest sequence that a folder's model is meant for; None where it does not say."""
    found = read_json(Path(folder).expanduser() / CONFIG_FILE).get("max_position_embeddings")
    return found if type(found) is int else None


def _check_architecture(path: Path, theirs: dict[str, Any]) -> None:
    if theirs.get("model_type") != "llama":
        raise UserError(f"{path}: model_type={theirs.get('model_type')!r} is not 'llama': only a Llama can be imported")
    for name, supported in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if theirs.get(name, supported) != supported:
            raise UserError(f"{path}: {name}={theirs[name]!r} is not {supported!r}: such a model cannot be imported")


def _rope_fields(path: Path, theirs: dict[str, Any]) -> dict[str, Any]:
    # Where both styles are there, transformers 5 follows `rope_scaling`.
    rope = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or theirs.get("rope_theta") or _THEIR_DEFAULTS["rope_theta"]
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return {"rope_theta": float(theta), "rope_scaling": None}
    if kind != "llama3":
        raise UserError(
            f"{path}: rope_type={kind!r} is neither 'default' nor 'llama3': such a model cannot be imported"
        )
    missing = [name for name in _ROPE_SCALING_FIELDS if name not in rope]
    if missing:
        raise UserError(f"{path}: rope_type='llama3' without {', '.join(missing)}: add what the model was trained with")
    scaling = {name: float(rope[name]) for name in _ROPE_SCALING_FIELDS}
    scaling["original_max_position_embeddings"] = int(rope["original_max_position_embeddings"])
    return {"rope_theta": float(theta), "rope_scaling": scaling}


def their_config(config: ModelConfig, max_position_embeddings: int) -> dict[str, Any]:
    """The entries of a config.json for `config`, as transformers 5 and earlier versions read them."""
    scaling = config.rope_scaling
    their_scaling = None
    if scaling is not None:
        their_scaling = {"rope_type": "llama3"} | dataclasses.asdict(scaling)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{name: getattr(config, ours) for ours, name in _CONFIG_NAMES.items()},
        "head_dim": config.hidden_size // config.num_heads,
        "max_position_embeddings": max_position_embeddings,
        # Both names of transformers 5 and, for readers of older folders, those before it.
        "rope_parameters": {"rope_theta": config.rope_theta} | (their_scaling or {"rope_type": "default"}),
        "rope_theta": config.rope_theta,
        "rope_scaling": their_scaling,
        "dtype": config.param_dtype,
        "torch_dtype": config.param_dtype,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "pad_token_id": None,
    }


def read_json(path: Path) -> dict[str, Any]:
    """Raise `UserError` where the file is missing or broken."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: name a folder in Hugging Face's format") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): copy it again") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a {type(values).__name__}, not an object: copy it again")
    return values
