"""A run's configuration: frozen dataclasses, the only place that holds a default.

`from_dict` turns a ConfigDict or a mapping into a checked `TrainConfig` once, at the boundary. Names and meanings are
part of the public interface: `--config.outer.sync_every=25` sets `TrainConfig.outer.sync_every`.
"""

import dataclasses
import difflib
import json
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from noloco_jax.config.checks import validate
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
    # What the backward pass computes again: nothing, all but the matmuls ("dots"), "full" layers, a pipeline "stage".
    remat: str = "none"


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
    wire_dtype: str = "float32"  # of the messages; noloco only
    offload: bool = False  # slow weights and momentum stay in host memory between outer steps


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
    on_bad_shard: str = "stop"  # or "skip": what to do at a damaged file


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
    # What becomes of a checkpoint's replicas if num_replicas has changed: fewer "merge" or "keep" some, more "copy".
    elastic: str = ""
    init_from: str = ""  # a Hugging Face folder to start from; "": random weights
    sample_prompt: str = ""  # what the merged model continues at the end of a run
    sample_tokens: int = 0  # 0: no sample


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


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested groups as one dict by dotted path: {"outer": {"lr": 0.7}} becomes {"outer.lr": 0.7}."""
    flat = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


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
