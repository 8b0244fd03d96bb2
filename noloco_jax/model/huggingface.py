"""Hugging Face's folders of Llama and its family (config.json and safetensors), read and written without PyTorch.

One tensor at a time passes between the files and the stacked parameters, so that no second copy of them is held.
"""

import dataclasses
import functools
import json
import math
import operator
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from noloco_jax.config import ModelConfig
from noloco_jax.data import Tokenizer
from noloco_jax.errors import UserError
from noloco_jax.files import check_writable
from noloco_jax.model.architecture import BUILT_IN, Params, param_axes, param_shapes
from noloco_jax.model.huggingface_config import (
    CONFIG_FILE,
    GENERATION_FILE,
    GIVEN_FILES,
    config_from_folder,
    ends_of,
    family_of,
    generation_config,
    read_json,
    their_config,
)
from noloco_jax.model.tokenizer_files import save_tokenizer

__all__ = ["check_has_format", "check_new_folder", "config_from_folder", "load_params", "save_folder"]

# Ours -> theirs. Their kernels are stored [out, in], ours [in, out].
_LAYER_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "router": "mlp.gate.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}

_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_TENSOR_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclasses.dataclass(frozen=True)
class _Slot:
    """The place of one of their tensors in the parameter dict."""

    path: tuple[str, ...]
    index: tuple[int, ...]  # in the stack: of the layer, and of the expert
    transposed: bool

    def of(self, params: Params) -> np.ndarray:
        """The tensor in their layout; it is a view where the parameters are numpy arrays."""
        leaf = self._leaf(params)
        array = np.asarray(leaf[self.index] if self.index else leaf)
        return array.T if self.transposed else array

    def shape(self, shapes: Params) -> tuple[int, ...]:
        shape = self._leaf(shapes).shape[len(self.index) :]
        return shape[::-1] if self.transposed else shape

    def _leaf(self, params: Params) -> Any:
        return functools.reduce(operator.getitem, self.path, params)


def _slots(config: ModelConfig) -> dict[str, _Slot]:
    """Their name of every tensor -> its slot."""
    slots = {
        "model.embed_tokens.weight": _Slot(("embed",), (), False),
        "model.norm.weight": _Slot(("norm",), (), False),
    }
    if not config.tie_embeddings:
        slots["lm_head.weight"] = _Slot(("head",), (), True)
    axes = param_axes(config)
    for ours, shape in param_shapes(config)["blocks"].items():
        path = "blocks", ours
        stack = [dim for dim, axis in zip(shape.shape, axes[path], strict=True) if axis in ("layer", "expert")]
        for layer, *expert in np.ndindex(*stack):
            name = _LAYER_NAMES[ours]
            if expert:
                name = name.replace("mlp.", f"mlp.experts.{expert[0]}.")
            is_kernel = len(shape.shape) - len(stack) == 2
            slots[f"model.layers.{layer}.{name}"] = _Slot(path, (layer, *expert), is_kernel)
    return slots


def load_params(folder: str | os.PathLike[str], config: ModelConfig) -> Params:
    """Read the weights of a folder, in one file or sharded with an index, float32, bfloat16 or float16.

    Returns the parameter dict in `config.param_dtype` as numpy arrays: put them on the devices that they belong on.
    Raises `UserError` where the folder is not whole, or holds another model than `config`.
    """
    folder = Path(folder).expanduser()
    check_has_format(config)
    _check_same_model(folder, config)
    params = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), param_shapes(config))
    slots = _slots(config)
    missing, tied_head = set(slots), None
    for path, name, reader in _tensors(folder):
        if name.endswith("rotary_emb.inv_freq"):  # older folders hold the rotary frequencies
            continue
        if config.tie_embeddings and name == "lm_head.weight":  # some tied ones hold the embedding a second time
            tied_head = path
            continue
        if name not in slots:
            raise UserError(
                f"{path}: the tensor {name} is not one of a {family_of(config)} with {config.num_layers} layers: name "
                "another folder"
            )
        target = slots[name].of(params)
        view = reader.get_slice(name)
        if tuple(view.get_shape()) != target.shape:
            raise UserError(
                f"{path}: the tensor {name} has shape {tuple(view.get_shape())}, and its {CONFIG_FILE} makes it "
                f"{target.shape}: the folder mixes two models"
            )
        dtype = view.get_dtype()
        if dtype not in _TENSOR_DTYPES:
            raise UserError(f"{path}: the tensor {name} is {dtype}: convert it to one of {', '.join(_TENSOR_DTYPES)}")
        if name not in missing:
            raise UserError(f"{path}: the tensor {name} is in another file of the folder too: remove one of them")
        target[...] = reader.get_tensor(name)
        _check_tensor_finite(path, name, target)
        missing.discard(name)
    if missing:
        raise UserError(f"{folder}: {len(missing)} of {len(slots)} tensors are missing, such as {min(missing)}")
    if tied_head is not None:
        with safe_open(tied_head, framework="np") as reader:
            head_VD = reader.get_tensor("lm_head.weight")
        if not np.array_equal(head_VD.astype(config.param_dtype), params["embed"]):
            raise UserError(
                f"{tied_head}: lm_head.weight differs from model.embed_tokens.weight, and {CONFIG_FILE} has "
                "tie_word_embeddings=true: set it to false there and give --config.model.tie_embeddings=False, or "
                "remove lm_head.weight"
            )
    return params


def _check_tensor_finite(path: Path, name: str, tensor: np.ndarray) -> None:
    """Raise `UserError` for values that are not finite: an untrained token's, say, which the loss never shows."""
    rows = np.flatnonzero(~np.isfinite(tensor).reshape(len(tensor), -1).all(axis=1))
    if rows.size:
        raise UserError(
            f"{path}: the tensor {name} has values that are not finite in {rows.size} of {len(tensor)} rows, such as "
            f"row {rows[0]}: replace them, for instance by the mean of the other rows"
        )


def check_has_format(config: ModelConfig) -> None:
    """Raise `UserError` for a model that Hugging Face has no format for: one's own, or parts that no family joins."""
    if config.kind not in BUILT_IN:
        raise UserError(
            f"model.kind={config.kind!r} has no format of Hugging Face's, to which only {' and '.join(BUILT_IN)} are "
            "converted: read its weights with noloco_jax.checkpoint.trained_model.load_for_export"
        )
    family_of(config)


def _check_same_model(folder: Path, config: ModelConfig) -> None:
    mine = dataclasses.asdict(config)
    if config.head_size * config.num_heads == config.hidden_size:
        mine["head_dim"] = None
    for name, theirs in ({"head_dim": None} | config_from_folder(folder)).items():
        ours = mine[name]
        if ours != theirs:
            raise UserError(
                f"{folder} is another model: its {name} is {theirs}, and model.{name}={ours}; "
                f"set model.{name} to its value, or name another folder"
            )


def _tensors(folder: Path) -> Iterator[tuple[Path, str, Any]]:
    """Yield (file, tensor name, the open reader of the file) of every tensor of a folder."""
    if (folder / _INDEX_FILE).exists():
        weight_map = read_json(folder / _INDEX_FILE).get("weight_map") or {}
        files = sorted(set(weight_map.values()))
        if _WEIGHTS_FILE not in files and (folder / _WEIGHTS_FILE).exists():
            raise UserError(
                f"{folder} holds {_WEIGHTS_FILE}, which transformers loads, and {_INDEX_FILE}, which names other "
                "files: remove one of the two"
            )
    else:
        files = [_WEIGHTS_FILE]
    for name in files:
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path} is missing: copy the whole folder, its weights as safetensors")
    for name in files:
        path = folder / name
        try:
            with safe_open(path, framework="np") as reader:
                for tensor in reader.keys():  # noqa: SIM118, a reader is no dict
                    yield path, tensor, reader
        except SafetensorError as error:
            raise UserError(f"{path} is not a whole safetensors file ({error}): copy it again") from None


def check_new_folder(folder: str | os.PathLike[str]) -> None:
    """Raise `UserError` where writing `folder` would overwrite something."""
    path = Path(folder)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} already holds something: name a new folder")
    check_writable(path)


def save_folder(
    folder: str | os.PathLike[str],
    params: Params,
    config: ModelConfig,
    tokenizer: Tokenizer | None = None,
    *,
    max_position_embeddings: int,
    bos_id: int | None = None,
    eos_id: int | None = None,
    given: Path | None = None,
) -> None:
    """Write what `transformers` loads as a causal model: config, weights and, where there is one, the tokenizer.

    The folder appears whole or not at all; one that is there already, perhaps a file system of its own, gets its
    config last, without which it is no model. The weights keep their dtype. A `UserWarning` says where `transformers`
    makes other token ids from the folder than the given tokenizer.

    Args:
      folder: where to; it must not exist yet, or be empty.
      params: the parameter dict, numpy or jax arrays.
      config: the model.
      tokenizer: the tokenizer of training; None: unknown.
      max_position_embeddings: the longest sequence, in tokens, that the model is meant for.
      bos_id, eos_id: the ids that begin and end a text, for the configs.
      given: the folder of the model that the training began as, whose generation_config.json is kept; None: none.
    """
    check_new_folder(folder)
    folder = Path(os.path.realpath(folder))
    is_there, name = folder.exists(), f"{folder.name}.{os.getpid()}.tmp"
    unfinished = folder / name if is_there else folder.with_name(name)
    unfinished.mkdir(parents=True)
    try:
        before, generation = (_read_if_there(given, name) for name in GIVEN_FILES)
        ids = {"bos_token_id": bos_id, "eos_token_id": None if eos_id is None else ends_of(before, eos_id)}
        _write_json(unfinished / CONFIG_FILE, their_config(config, max_position_embeddings) | ids)
        _write_json(unfinished / GENERATION_FILE, generation_config(generation, bos_id, eos_id))
        if tokenizer is not None:
            save_tokenizer(tokenizer, unfinished, add_bos=bos_id is not None)
        _write_safetensors(unfinished / _WEIGHTS_FILE, params, config)
        if not is_there:
            unfinished.replace(folder)
        for file in sorted(unfinished.iterdir(), key=lambda file: file.name == CONFIG_FILE) if is_there else ():
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _read_if_there(folder: Path | None, name: str) -> dict[str, Any]:
    return read_json(folder / name) if folder is not None and (folder / name).is_file() else {}


def _write_safetensors(path: Path, params: Params, config: ModelConfig) -> None:
    """Write one tensor after another; `safetensors.numpy.save_file` needs transposed copies of all of them at once."""
    dtype = np.dtype(config.param_dtype)
    dtype_name = next(theirs for theirs, ours in _TENSOR_DTYPES.items() if ours == config.param_dtype)
    slots = dict(sorted(_slots(config).items()))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    shapes = param_shapes(config)
    end = 0
    for name, slot in slots.items():
        shape = slot.shape(shapes)
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype_name, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for slot in slots.values():
            file.write(slot.of(params).astype(dtype, copy=False).tobytes())


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
