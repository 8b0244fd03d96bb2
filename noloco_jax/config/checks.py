"""What makes a configuration consistent, in a field and between fields, as far as shows without devices or data."""

import dataclasses
import difflib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from noloco_jax.errors import UserError

if TYPE_CHECKING:
    from noloco_jax.config.fields import ModelConfig, TrainConfig

CHOICES = {
    "method": ("noloco", "diloco", "ddp", "local"),
    "elastic": ("", "merge", "keep", "copy"),
    "model.dtype": ("float32", "bfloat16"),
    "model.param_dtype": ("float32", "bfloat16"),
    "model.remat": ("none", "full", "dots", "stage"),
    "outer.state_dtype": ("float32", "bfloat16"),
    "outer.wire_dtype": ("float32", "bfloat16"),
    "data.kind": ("c4", "jsonl", "parquet", "text"),
    "data.on_bad_shard": ("stop", "skip"),
    "mesh.routing": ("random", "fixed"),
}

# The least value that a number may have; every other number has to be positive, a mesh axis positive or -1.
_MINIMUM = {
    "seed": 0,
    "sample_tokens": 0,
    "inner.min_lr": 0,
    "inner.warmup_steps": 0,
    "inner.b1": 0,
    "inner.b2": 0,
    "inner.weight_decay": 0,
    "outer.momentum": 0,
    "outer.consensus": 0,
    "data.num_workers": 0,
}
_BELOW_ONE = ("inner.b1", "inner.b2", "outer.momentum")
_MESH_AXES = ("mesh.replica", "mesh.stage", "mesh.fsdp", "mesh.tensor")


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{entry.name}.")
        else:
            yield prefix + entry.name, value


def _validate_alone(path: str, value: Any) -> None:
    """What a field has to satisfy whatever the others are."""
    if path in CHOICES and value not in CHOICES[path]:
        near = difflib.get_close_matches(str(value), CHOICES[path], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(CHOICES[path])}"
        raise UserError(f"{path}={value!r} is unknown: {hint}")
    if path == "data.tokenizer" and not value:
        raise UserError("data.tokenizer is empty: give 'byte', or a transformers tokenizer's name or folder")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not math.isfinite(value):
        raise UserError(f"{path}={value} is not a finite number: give one")
    if path in _MESH_AXES:
        if value < 1 and value != -1:
            raise UserError(f"{path}={value} is no number of devices: give 1 or more, or -1 for what is left")
    elif path in _MINIMUM:
        if value < _MINIMUM[path]:
            raise UserError(f"{path}={value} is below {_MINIMUM[path]}: raise it")
    elif value <= 0:
        raise UserError(f"{path}={value} is not positive: raise it")
    if path in _BELOW_ONE and value >= 1:
        raise UserError(f"{path}={value} is not below 1: lower it")


def _need_multiple(of_path: str, of: int, by_path: str, by: int) -> None:
    if of % by:
        raise UserError(f"{of_path}={of} is not a multiple of {by_path}={by}: change one of them")


def validate(config: "TrainConfig") -> None:
    """Raises `UserError` at the first field that is out of range or at odds with another."""
    for path, value in _leaves(config):
        _validate_alone(path, value)
    _validate_model(config.model)
    _validate_run(config)
    _validate_mesh(config)


def _validate_model(model: "ModelConfig") -> None:
    _need_multiple("model.hidden_size", model.hidden_size, "model.num_heads", model.num_heads)
    _need_multiple("model.num_heads", model.num_heads, "model.num_kv_heads", model.num_kv_heads)
    head_dim = model.hidden_size // model.num_heads
    if head_dim % 2:
        raise UserError(
            f"model.hidden_size={model.hidden_size} over model.num_heads={model.num_heads} gives heads of {head_dim}, "
            "which rotary embedding cannot pair up: make it even"
        )
    rope = model.rope_scaling
    if rope is not None and rope.low_freq_factor >= rope.high_freq_factor:
        raise UserError(
            f"model.rope_scaling.low_freq_factor={rope.low_freq_factor} is not below "
            f"model.rope_scaling.high_freq_factor={rope.high_freq_factor}: swap or change them"
        )


def _validate_run(config: "TrainConfig") -> None:
    inner, outer, replicas = config.inner, config.outer, config.num_replicas
    if inner.warmup_steps > config.num_steps:
        raise UserError(
            f"inner.warmup_steps={inner.warmup_steps} is more than num_steps={config.num_steps}: lower the warmup"
        )
    if inner.min_lr > inner.lr:
        raise UserError(f"inner.min_lr={inner.min_lr} is above inner.lr={inner.lr}: lower it")
    if config.method == "noloco" and replicas < 2:
        raise UserError(f"method='noloco' averages pairs and num_replicas={replicas}: use 2 or more, or method='local'")
    if config.method == "noloco" and not 2 <= outer.group_size <= replicas:
        raise UserError(
            f"outer.group_size={outer.group_size} is not between 2 and num_replicas={replicas}: change one of them"
        )
    if config.method != "noloco" and outer.wire_dtype != "float32":
        raise UserError(
            f"outer.wire_dtype={outer.wire_dtype!r} rounds noloco's messages and method={config.method!r}: "
            "leave it at 'float32'"
        )
    if config.method not in ("noloco", "diloco") and outer.offload:
        raise UserError(f"outer.offload=True and method={config.method!r} has no outer state: leave it out")
    _need_multiple("data.batch_size", config.data.batch_size, "num_microbatches", config.num_microbatches)


def _validate_mesh(config: "TrainConfig") -> None:
    mesh = config.mesh
    left_open = [path for path in _MESH_AXES if getattr(mesh, path.removeprefix("mesh.")) == -1]
    if len(left_open) > 1:
        raise UserError(f"{' and '.join(left_open)} are both -1: only one mesh axis can be what is left")
    if mesh.stage == -1:
        raise UserError("mesh.stage=-1 leaves the number of pipeline stages open: give 1 or more")
    if mesh.replica != -1:
        _need_multiple("num_replicas", config.num_replicas, "mesh.replica", mesh.replica)
    if mesh.stage == 1:
        if config.model.remat == "stage":
            raise UserError("model.remat='stage' computes pipeline stages again and mesh.stage=1: use 'full' or 'dots'")
        return
    _need_multiple("model.num_layers", config.model.num_layers, "mesh.stage", mesh.stage)
    if config.model.tie_embeddings:
        raise UserError(
            f"model.tie_embeddings=True shares a matrix between the first and last of mesh.stage={mesh.stage} stages: "
            "untie them or use one stage"
        )
    if mesh.routing == "random" and config.num_replicas == 1:
        raise UserError(
            "mesh.routing='random' sends micro-batches to other replicas and num_replicas=1: use mesh.routing='fixed'"
        )
