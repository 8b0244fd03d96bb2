"""A run's configuration: frozen dataclasses, the only place that holds a default, and what makes them consistent.

`from_dict` turns a ConfigDict or a mapping into a checked `TrainConfig` once, at the boundary. Names and meanings are
part of the public interface: `--config.outer.sync_every=25` sets `TrainConfig.outer.sync_every`.
"""

import dataclasses
import difflib
import json
import math
import os
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from noloco_jax.errors import UserError


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of the rotary frequencies; the names are those of a Hugging Face config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    hidden_size: int = 256
    intermediate_size: int = 1024
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 4
    vocab_size: int = 259  # the byte tokenizer's
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    dtype: str = "float32"  # of the computation
    param_dtype: str = "float32"  # of the weights that the optimizer steps
    remat: str = "none"  # what the backward pass computes again: nothing, "full" blocks, all but the matmuls ("dots")


@dataclass(frozen=True)
class InnerConfig:
    """Adam inside a replica, after `warmup_steps` of linear warmup on a cosine from `lr` to `min_lr`."""

    lr: float = 6e-4
    min_lr: float = 6e-5
    warmup_steps: int = 20
    clip_norm: float = 1.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True)
class OuterConfig:
    """The step between replicas; `noloco` and `diloco` take it every `sync_every` inner steps."""

    lr: float = 0.7  # the paper's beta
    momentum: float = 0.5  # alpha
    consensus: float | None = None  # gamma; None: the same as lr. noloco only
    sync_every: int = 50
    group_size: int = 2  # noloco only
    nesterov: bool = False  # diloco only
    state_dtype: str = "float32"  # of slow weights and outer momentum


@dataclass(frozen=True)
class DataConfig:
    kind: str = "text"
    path: str = ""
    validation_path: str = ""  # "": found beside or held out of `path`, as the kind has it
    tokenizer: str = "byte"  # or a transformers tokenizer's name or folder
    add_bos: bool = True
    add_eos: bool = True
    sequence_length: int = 256
    batch_size: int = 8  # sequences per replica per step
    num_workers: int = 0
    shuffle_buffer: int = 1000  # documents


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; -1: what the others leave."""

    replica: int = -1
    stage: int = 1
    fsdp: int = 1
    tensor: int = 1
    routing: str = "random"  # of micro-batches between the stages of different replicas


@dataclass(frozen=True)
class TrainConfig:
    method: str = "noloco"
    num_replicas: int = 4
    num_steps: int = 1000  # inner steps
    seed: int = 0
    num_microbatches: int = 1
    model: ModelConfig = field(default_factory=ModelConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    eval_every: int = 500
    eval_batches: int = 16
    log_every: int = 10
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    init_from: str = ""  # a Hugging Face folder to start from; "": random weights
    sample_prompt: str = ""  # what the merged model continues at the end of a run
    sample_tokens: int = 0  # 0: no sample


CHOICES = {
    "method": ("noloco", "diloco", "ddp", "local"),
    "model.dtype": ("float32", "bfloat16"),
    "model.param_dtype": ("float32", "bfloat16"),
    "model.remat": ("none", "full", "dots"),
    "outer.state_dtype": ("float32", "bfloat16"),
    "data.kind": ("c4", "parquet", "text"),
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


@dataclass(frozen=True)
class FieldInfo:
    """A leaf of the configuration: its type, and whether None is a value of it."""

    type: type
    optional: bool


def _unwrap(annotation: Any) -> tuple[type, bool]:
    if isinstance(annotation, types.UnionType):
        (inner,) = (arg for arg in typing.get_args(annotation) if arg is not types.NoneType)
        return inner, True
    return annotation, False


def field_types(cls: type) -> dict[str, tuple[type, bool]]:
    """Field name -> (type without None, whether None is allowed), of one of the dataclasses."""
    return {name: _unwrap(annotation) for name, annotation in typing.get_type_hints(cls).items()}


def known_fields(cls: type = TrainConfig, prefix: str = "") -> dict[str, FieldInfo]:
    """Every leaf field by its dotted path."""
    leaves = {}
    for name, (kind, optional) in field_types(cls).items():
        if dataclasses.is_dataclass(kind):
            leaves |= known_fields(kind, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = FieldInfo(kind, optional)
    return leaves


def _similarity(left: str, right: str) -> float:
    return difflib.SequenceMatcher(a=left, b=right).ratio()


def unknown_field(path: str) -> UserError:
    """The error for a field that does not exist, with the names that may have been meant."""
    known = dict.fromkeys(known_fields())
    known |= dict.fromkeys(name.rpartition(".")[0] for name in known if "." in name)  # the groups themselves
    section, _, leaf = path.rpartition(".")
    scores = {}
    for name in known:
        its_section, _, its_leaf = name.rpartition(".")
        if _similarity(leaf, its_leaf) >= 0.65:
            scores[name] = _similarity(leaf, its_leaf) + 0.3 * _similarity(section, its_section)
    if scores:
        near = [name for name, score in scores.items() if score == max(scores.values())]
        return UserError(f"unknown config field {path!r}: did you mean {' or '.join(map(repr, near))}?")
    siblings = [name for name in known if name.rpartition(".")[0] == section]
    siblings = siblings or [name for name in known if "." not in name]
    return UserError(f"unknown config field {path!r}: the fields there are {', '.join(siblings)}")


def checked_value(path: str, kind: type, optional: bool, value: Any) -> Any:
    """`value` as the field at `path` holds it: an int becomes a float where one is due; anything else must match."""
    if value is None and optional:
        return None
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise UserError(
            f"config field {path}: expected {kind.__name__}{' or None' if optional else ''}, "
            f"got {value!r} ({type(value).__name__})"
        )
    return value


def _build(cls: type, values: Any, prefix: str) -> Any:
    if not isinstance(values, Mapping):
        raise UserError(f"config field {prefix[:-1]}: expected a group of fields, got {values!r}")
    fields = field_types(cls)
    built = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if name not in fields:
            raise unknown_field(path)
        kind, optional = fields[name]
        if not dataclasses.is_dataclass(kind):
            built[name] = checked_value(path, kind, optional, value)
        elif optional and isinstance(value, Mapping | None):
            given = {key: entry for key, entry in (value or {}).items() if entry is not None}
            built[name] = _build(kind, given, path + ".") if given else None
        else:
            built[name] = _build(kind, value, path + ".")
    for entry in dataclasses.fields(cls):
        required = entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        if required and entry.name not in built:
            raise UserError(f"config field {prefix}{entry.name} is missing: the other {prefix}* fields need it")
    return cls(**built)


def from_dict(values: ConfigDict | Mapping[str, Any]) -> TrainConfig:
    """The checked configuration; fields that `values` leaves out take the dataclasses' defaults.

    Raises `UserError` for an unknown field, a value of another type, or fields that contradict each other.
    """
    config = _build(TrainConfig, values.to_dict() if isinstance(values, ConfigDict) else values, "")
    validate(config)
    return config


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Nested plain values that JSON can hold and `from_dict` reads back."""
    return dataclasses.asdict(config)


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


def validate(config: TrainConfig) -> None:
    """Raises `UserError` at the first field that is out of range or at odds with another."""
    for path, value in _leaves(config):
        _validate_alone(path, value)
    _validate_model(config.model)
    _validate_run(config)
    _validate_mesh(config)


def _validate_model(model: ModelConfig) -> None:
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


def _validate_run(config: TrainConfig) -> None:
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
    _need_multiple("data.batch_size", config.data.batch_size, "num_microbatches", config.num_microbatches)


def _validate_mesh(config: TrainConfig) -> None:
    mesh = config.mesh
    left_open = [path for path in _MESH_AXES if getattr(mesh, path.removeprefix("mesh.")) == -1]
    if len(left_open) > 1:
        raise UserError(f"{' and '.join(left_open)} are both -1: only one mesh axis can be what is left")
    if mesh.stage == -1:
        raise UserError("mesh.stage=-1 leaves the number of pipeline stages open: give 1 or more")
    if mesh.replica != -1:
        _need_multiple("num_replicas", config.num_replicas, "mesh.replica", mesh.replica)
    if mesh.stage == 1:
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


CONFIG_FILE = "config.json"


def save_config(config: TrainConfig, workdir: str | os.PathLike[str]) -> Path:
    """Writes the resolved configuration to WORKDIR/config.json, whole or not at all, and returns its path."""
    path = Path(workdir) / CONFIG_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(json.dumps(to_dict(config), indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return path


def load_saved(workdir: str | os.PathLike[str]) -> TrainConfig:
    """The configuration that a run in `workdir` was started with."""
    path = Path(workdir) / CONFIG_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is not there: give the --workdir of a run that was started") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): restore it, or start afresh in another --workdir") from None
    try:
        return from_dict(values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
