"""Checks between fields of a configuration, as far as they need no devices and no data."""

import re
from collections.abc import Iterator

from noloco_jax.config.fields import DataConfig, ModelConfig, TrainConfig
from noloco_jax.config.schema import shown
from noloco_jax.optim.methods import METHODS

_KIND = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def contradictions(config: TrainConfig) -> Iterator[str]:
    """Yield a message for all fields that are at odds with another; each alone is in its range."""
    method = METHODS[config.method]
    yield from _model_mistakes(config.model)
    yield from _data_mistakes(config.data)
    yield from _run_mistakes(config)
    yield from method.mistakes(config.num_replicas, config.outer)
    if method.has_outer_steps:
        yield from _outer_mistakes(config)
    yield from _mesh_mistakes(config)


def _multiple(of_path: str, of: int, by_path: str, by: int) -> Iterator[str]:
    if of % by:
        yield f"{of_path}={of} is not a multiple of {by_path}={by}: change one of them"


def _model_mistakes(model: ModelConfig) -> Iterator[str]:
    if not model.is_built_in:
        if not _KIND.fullmatch(model.kind):
            yield (
                f"model.kind={shown(model.kind)} is neither 'llama' nor 'moe' nor a class of one's own: give it as "
                "--config.model.kind=my_package.my_module:MyModel"
            )
        return  # the fields below are not for it, or it checks them itself
    if model.kind == "moe" and model.experts_per_token > model.num_experts:
        yield (
            f"model.experts_per_token={model.experts_per_token} is more than model.num_experts={model.num_experts}: "
            "lower it, or add experts"
        )
    if model.head_dim is None:
        yield from _multiple("model.hidden_size", model.hidden_size, "model.num_heads", model.num_heads)
    yield from _multiple("model.num_heads", model.num_heads, "model.num_kv_heads", model.num_kv_heads)
    if model.head_size % 2 and (model.head_dim is not None or not model.hidden_size % model.num_heads):
        which = (
            f"model.hidden_size={model.hidden_size} over model.num_heads={model.num_heads} gives heads of"
            if model.head_dim is None
            else "model.head_dim is"
        )
        yield f"{which} {model.head_size}, which rotary embedding cannot pair up: make it even"
    rope = model.rope_scaling
    if rope is not None and rope.low_freq_factor >= rope.high_freq_factor:
        yield (
            f"model.rope_scaling.low_freq_factor={rope.low_freq_factor} is not below "
            f"model.rope_scaling.high_freq_factor={rope.high_freq_factor}: swap or change them"
        )


def _data_mistakes(data: DataConfig) -> Iterator[str]:
    if data.kind != "mixture":
        if data.mixture:
            yield (
                f"data.mixture.{next(iter(data.mixture))} is for data.kind='mixture' and data.kind={data.kind!r}: give "
                "--config.data.kind=mixture, or no data.mixture"
            )
        return
    if not data.mixture:
        yield (
            "data.kind='mixture' and data.mixture names no source: give data.mixture.NAME.kind, .path and .weight of "
            "each, under a NAME that you choose"
        )
        return
    for name in ("path", "validation_path", "text_column"):
        default = getattr(DataConfig, name)
        if getattr(data, name) != default:
            yield (
                f"data.{name}={shown(getattr(data, name))} is not for data.kind='mixture': give it to a source, as "
                f"--config.data.mixture.{next(iter(data.mixture))}.{name}, and --config.data.{name}={default} here"
            )


def _run_mistakes(config: TrainConfig) -> Iterator[str]:
    inner = config.inner
    if inner.min_lr > inner.lr:
        yield f"inner.min_lr={inner.min_lr} is above inner.lr={inner.lr}: lower it"
    if inner.optimizer == "adam" and inner.weight_decay:
        yield (
            f"inner.weight_decay={inner.weight_decay} is not for inner.optimizer='adam': give "
            "--config.inner.optimizer=adamw, or no weight decay"
        )
    if inner.optimizer != "muon" and inner.adam_lr is not None:
        yield (
            f"inner.adam_lr={inner.adam_lr} is what goes beside muon's rate and inner.optimizer={inner.optimizer!r}: "
            "give inner.lr alone"
        )
    yield from _multiple("keep_period", config.keep_period, "checkpoint_every", config.checkpoint_every)
    yield from _multiple("data.batch_size", config.data.batch_size, "num_microbatches", config.num_microbatches)


def _outer_mistakes(config: TrainConfig) -> Iterator[str]:
    outer = config.outer
    if config.model.is_built_in:  # of other models `spmd.sharding` knows the weights
        width, parts = config.model.hidden_size, max(config.mesh.fsdp, 1)
        yield from _multiple("model.hidden_size", width, "outer.fragments", outer.fragments)
        if parts > 1 and not width % outer.fragments:
            yield from _multiple("model.hidden_size / mesh.fsdp", width // parts, "outer.fragments", outer.fragments)
    try:
        _ = config.schedule
    except ValueError as error:
        yield f"outer.{error}"


def _mesh_mistakes(config: TrainConfig) -> Iterator[str]:
    mesh = config.mesh
    left_open = [f"mesh.{axis}" for axis in ("replica", "fsdp", "tensor") if getattr(mesh, axis) == -1]
    if len(left_open) > 1:
        yield f"{' and '.join(left_open)} are both -1: only one mesh axis can be what is left"
    if mesh.replica != -1:
        yield from _multiple("num_replicas", config.num_replicas, "mesh.replica", mesh.replica)
    if mesh.stage == 1:
        if config.model.remat == "stage":
            yield "model.remat='stage' computes pipeline stages again and mesh.stage=1: use 'full' or 'dots'"
        return
    yield from _multiple("model.num_layers", config.model.num_layers, "mesh.stage", mesh.stage)
    if config.model.tie_embeddings:
        yield (
            f"model.tie_embeddings=True shares a matrix between the first and last of mesh.stage={mesh.stage} stages: "
            "untie them or use one stage"
        )
    if mesh.routing == "random" and config.num_replicas == 1:
        yield (
            "mesh.routing='random' sends micro-batches to other replicas and num_replicas=1: use mesh.routing='fixed'"
        )
