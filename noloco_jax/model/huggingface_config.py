"""Hugging Face's config.json of Llama and its family, read into the model's fields and written from them."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from noloco_jax.config import ModelConfig
from noloco_jax.errors import UserError

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
GIVEN_FILES = (CONFIG_FILE, GENERATION_FILE)  # that an export reads of the model that a run began as

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
# What their configurations take for an entry that a config.json leaves out.
_THEIR_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
}
_MOE_NAMES = _CONFIG_NAMES | {
    "intermediate_size": "moe_intermediate_size",
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "norm_topk_prob": "norm_topk_prob",
    "router_aux_loss_coef": "router_aux_loss_coef",
}
_ROPE_SCALING_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class Family(NamedTuple):
    """A `model_type` of theirs.

    Attributes:
      architecture: the class that loads it.
      fields: fields of `ModelConfig` that make a model one of the family.
      fixed: entries that have one value where they are there, since others make another model.
      head_dim: what an absent `head_dim` stands for. None: hidden_size / num_attention_heads.
      names: our fields and their entries.
    """

    architecture: str
    fields: Mapping[str, Any]
    fixed: Mapping[str, Any]
    head_dim: int | None = None
    names: Mapping[str, str] = MappingProxyType(_CONFIG_NAMES)


_NO_BIASES = {"attention_bias": False, "mlp_bias": False}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", {"kind": "llama", "qkv_bias": False, "qk_norm": False}, _NO_BIASES),
    "mistral": Family("MistralForCausalLM", {"kind": "llama", "qkv_bias": False, "qk_norm": False}, {}),
    "qwen2": Family("Qwen2ForCausalLM", {"kind": "llama", "qkv_bias": True, "qk_norm": False}, {}),
    "qwen3": Family(
        "Qwen3ForCausalLM", {"kind": "llama", "qkv_bias": False, "qk_norm": True}, _NO_BIASES, head_dim=128
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"kind": "moe", "qkv_bias": False, "qk_norm": True},
        {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        names=_MOE_NAMES,
    ),
}


def config_from_folder(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a folder's config.json into `ModelConfig` fields; dtype, param_dtype and remat are a run's own choice.

    The rotary settings may stand under `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`.
    Raises `UserError` where there is no config.json, or it describes another architecture than `FAMILIES` has.
    """
    path = Path(folder).expanduser() / CONFIG_FILE
    theirs = read_json(path)
    family = _family_of(path, theirs)
    if "num_local_experts" in theirs:  # transformers 5's name
        theirs.setdefault("num_experts", theirs["num_local_experts"])
    fields: dict[str, Any] = dict(family.fields)
    for ours, name in family.names.items():
        if name in theirs and theirs[name] is not None:
            fields[ours] = theirs[name]
        elif name == "num_key_value_heads" and theirs["model_type"] == "llama":
            fields[ours] = theirs["num_attention_heads"]
        elif name in _THEIR_DEFAULTS:
            fields[ours] = _THEIR_DEFAULTS[name]
        else:
            raise UserError(f"{path} has no {name}: it does not describe a {theirs['model_type']}, name another folder")
    head_dim = theirs.get("head_dim") or family.head_dim
    if head_dim is not None and head_dim * fields["num_heads"] != fields["hidden_size"]:
        fields["head_dim"] = head_dim
    return fields | {"sliding_window": _window_of(path, theirs)} | _rope_fields(path, theirs)


def _family_of(path: Path, theirs: dict[str, Any]) -> Family:
    family = FAMILIES.get(theirs.get("model_type", ""))
    if family is None:
        raise UserError(
            f"{path}: model_type={theirs.get('model_type')!r} cannot be imported: {', '.join(FAMILIES)} can"
        )
    for name, supported in {"hidden_act": "silu", **family.fixed}.items():
        given = "silu" if theirs.get(name) == "swish" else theirs.get(name)  # two names of one function
        if given is not None and given != supported:  # null stands for the default
            raise UserError(f"{path}: {name}={given!r} is not {supported!r}: such a model cannot be imported")
    return family


def _window_of(path: Path, theirs: dict[str, Any]) -> int | None:
    """Return the window of all layers; raise `UserError` where only some have one, or `layer_types` contradicts it."""
    model_type, num_layers, layers = theirs["model_type"], theirs["num_hidden_layers"], theirs.get("layer_types")
    window = theirs.get("sliding_window", 4096)
    is_used = model_type == "mistral" or (
        model_type != "llama" and window is not None and bool(theirs.get("use_sliding_window"))
    )
    if is_used and model_type in ("qwen2", "qwen3"):
        given = theirs.get("max_window_layers")
        first = min(28 if given is None else given, num_layers)
        layers = layers or ["full_attention"] * first + ["sliding_attention"] * (num_layers - first)
        is_used = "sliding_attention" in layers
    window = window if is_used else None
    expected = "full_attention" if window is None else "sliding_attention"
    if layers and {*layers} != {expected}:
        raise UserError(
            f"{path}: {layers.count('sliding_attention')} of {num_layers} layers have a sliding window (layer_types or "
            f"max_window_layers), and sliding_window={theirs.get('sliding_window')} is of all layers or none here: "
            "such a model cannot be imported"
        )
    return window


def max_positions(folder: str | os.PathLike[str]) -> int | None:
    """Return the `max_position_embeddings` of a folder's model; None if its config.json has none."""
    found = read_json(Path(folder).expanduser() / CONFIG_FILE).get("max_position_embeddings")
    return found if type(found) is int else None


def _rope_fields(path: Path, theirs: dict[str, Any]) -> dict[str, Any]:
    # Where both styles are there, transformers 5 follows `rope_scaling`.
    rope = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or theirs.get("rope_theta") or _THEIR_DEFAULTS["rope_theta"]
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if (share := rope.get("partial_rotary_factor", theirs.get("partial_rotary_factor"))) not in (None, 1):
        raise UserError(f"{path}: partial_rotary_factor={share} is not 1: such a model cannot be imported")
    if rope_type == "default":
        return {"rope_theta": float(theta), "rope_scaling": None}
    if rope_type != "llama3":
        raise UserError(
            f"{path}: rope_type={rope_type!r} is neither 'default' nor 'llama3': such a model cannot be imported"
        )
    original = theirs.get("original_max_position_embeddings")
    if original is not None:  # it comes before the entry in `rope`, as in transformers 5
        rope = rope | {"original_max_position_embeddings": original}
    missing = [name for name in _ROPE_SCALING_FIELDS if name not in rope]
    if missing:
        raise UserError(f"{path}: rope_type='llama3' without {', '.join(missing)}: add what the model was trained with")
    scaling = {name: float(rope[name]) for name in _ROPE_SCALING_FIELDS}
    scaling["original_max_position_embeddings"] = int(rope["original_max_position_embeddings"])
    return {"rope_theta": float(theta), "rope_scaling": scaling}


def family_of(config: ModelConfig) -> str:
    """Return the `model_type` that a model is exported as.

    Raises:
      UserError: if transformers has none with its parts.
    """
    if config.qkv_bias and config.qk_norm:
        raise UserError(
            "model.qkv_bias=True with model.qk_norm=True is none of transformers' models "
            f"({', '.join(FAMILIES)}): leave one out of what is to be exported"
        )
    if config.kind == "moe" and (config.qkv_bias or not config.qk_norm):
        raise UserError(
            "model.kind='moe' is exported as transformers' qwen3_moe, which has model.qk_norm=True and "
            f"model.qkv_bias=False, and here they are {config.qk_norm} and {config.qkv_bias}: train with its values to "
            "export"
        )
    if config.kind == "moe":
        return "qwen3_moe"
    if config.qkv_bias:
        return "qwen2"
    if config.qk_norm:
        return "qwen3"
    # transformers 5 refuses a llama whose heads do not divide its hidden size; a mistral without a window is the same.
    is_llama = config.sliding_window is None and config.hidden_size % config.num_heads == 0
    return "llama" if is_llama else "mistral"


def their_config(config: ModelConfig, max_position_embeddings: int) -> dict[str, Any]:
    """The entries of a config.json for `config`, as transformers 5 and earlier versions read them."""
    model_type = family_of(config)
    scaling = config.rope_scaling
    their_scaling = None
    if scaling is not None:
        their_scaling = {"rope_type": "llama3"} | dataclasses.asdict(scaling)
    return {
        "architectures": [FAMILIES[model_type].architecture],
        "model_type": model_type,
        **{name: getattr(config, ours) for ours, name in FAMILIES[model_type].names.items()},
        "head_dim": config.head_size,
        "max_position_embeddings": max_position_embeddings,
        # Both names of transformers 5 and, for readers of older folders, those before it.
        "rope_parameters": {"rope_theta": config.rope_theta} | (their_scaling or {"rope_type": "default"}),
        "rope_theta": config.rope_theta,
        "rope_scaling": their_scaling,
        "dtype": config.param_dtype,
        "torch_dtype": config.param_dtype,
        "hidden_act": "silu",
        **FAMILIES[model_type].fixed,
        **_their_window(model_type, config),
        "initializer_range": 0.02,
        "pad_token_id": None,
    }


def generation_config(given: Mapping[str, Any], bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
    """The entries of a generation_config.json: those of the model that the run began as, and the ids of training.

    Args:
      given: that model's entries; empty if there is none.
      bos_id, eos_id: the ids that begin and end a document; None: documents had none.
    """
    begin = given.get("bos_token_id") if bos_id is None else bos_id
    ids = {"bos_token_id": begin, "eos_token_id": ends_of(given, eos_id)}
    return ({"_from_model_config": True} if not given else dict(given)) | ids


def ends_of(given: Mapping[str, Any], eos_id: int | None) -> Any:
    """The ids at which a text ends: those of the given entries, and that of training; a list only of several."""
    ends = given.get("eos_token_id")
    ends = [] if ends is None else list(ends) if isinstance(ends, list) else [ends]
    ends += [eos_id] if eos_id is not None and eos_id not in ends else []
    return ends if len(ends) > 1 else next(iter(ends), None)


def _their_window(model_type: str, config: ModelConfig) -> dict[str, Any]:
    if model_type == "llama":
        return {}
    window: dict[str, Any] = {"sliding_window": config.sliding_window}
    if model_type == "mistral":
        return window
    is_used = config.sliding_window is not None
    if model_type == "qwen3_moe":
        return window | {"use_sliding_window": is_used}
    return window | {
        "use_sliding_window": is_used,
        "max_window_layers": 0 if is_used else config.num_layers,
        "layer_types": ["sliding_attention" if is_used else "full_attention"] * config.num_layers,
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
