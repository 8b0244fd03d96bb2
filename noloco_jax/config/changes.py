"""Differences between two configurations of a run, and settings that its method ignores."""

import re
from typing import Any, Literal, NamedTuple

from noloco_jax.config.build import known_fields
from noloco_jax.config.config_file import to_dict
from noloco_jax.config.fields import TrainConfig
from noloco_jax.config.schema import NAME, field_at, flatten
from noloco_jax.optim.methods import METHODS
from noloco_jax.optim.wire_sizes import MODULO_BITS

OnResume = Literal["must match", "may change", "free"]

# Fields whose value a resume must keep: the arrays of a checkpoint, or the meaning of its positions, depend on them.
MUST_MATCH = (
    *("method", "seed", "init_from", "inner.optimizer"),
    *("model.kind", "model.hidden_size", "model.intermediate_size", "model.num_layers", "model.num_heads"),
    *("model.num_kv_heads", "model.head_dim", "model.qkv_bias", "model.qk_norm", "model.sliding_window"),
    *("model.num_experts", "model.experts_per_token", "model.norm_topk_prob", "model.vocab_size", "model.rope_theta"),
    *("model.rope_scaling", "model.norm_eps", "model.tie_embeddings", "model.param_dtype"),
    *("outer.fragments", "outer.delay"),
    *("data.kind", "data.text_column", "data.add_bos", "data.add_eos", "data.shuffle_buffer"),
    *("data.mixture.NAME.kind", "data.mixture.NAME.text_column"),
)
# Fields that change no figure of a run: a resume does not tell their changes.
FREE = (
    *("outer.offload", "data.num_workers", "log_every", "log_replicas"),
    *("checkpoint_every", "keep_checkpoints", "keep_period", "elastic"),
)
_OF_EXPERTS = ("model.num_experts", "model.experts_per_token", "model.norm_topk_prob", "model.router_aux_loss_coef")


def on_resume(path: str, wires: tuple[str | None, ...] = ()) -> OnResume:
    """Return what a resume with another value of a field does: it is refused, told, or goes without a word.

    Args:
      path: the field, with any name for an entry of a group by name.
      wires: the wire formats before and now. A change to or from modulo4 is refused, as it has arrays of its own.
    """
    if path == "outer.wire" and len({wire in MODULO_BITS for wire in wires}) > 1:
        return "must match"
    path = re.sub(r"^(data\.mixture)\.[^.]+", rf"\1.{NAME}", path)
    if any(path == name or path.startswith(f"{name}.") for name in MUST_MATCH):
        return "must match"
    return "free" if path in FREE else "may change"


class Change(NamedTuple):
    """A field with two values."""

    field: str
    before: Any
    now: Any
    on_resume: OnResume

    def __str__(self) -> str:
        return f"{self.field}: {self.before!r} before, {self.now!r} now"


def changes(before: TrainConfig, now: TrainConfig) -> list[Change]:
    """Return the fields with different values, in their order, but those that neither configuration uses."""
    left, right = flatten(to_dict(before)), flatten(to_dict(now))
    return [
        Change(path, left.get(path), right.get(path), on_resume(path, (before.outer.wire, now.outer.wire)))
        for path in dict.fromkeys([*left, *right])
        if left.get(path) != right.get(path)
        and field_at(TrainConfig, path) is not None
        and not (_is_unused(before, path) and _is_unused(now, path))
    ]


def unused_settings(config: TrainConfig) -> list[str]:
    """Return "FIELD=VALUE" of every non-default field that the configuration's method and other fields leave unused."""
    values = flatten(to_dict(config))
    return [
        f"{path}={values.get(path)!r}"
        for path, field in known_fields().items()
        if _is_unused(config, path) and values.get(path) != field.default
    ]


def _is_unused(config: TrainConfig, path: str) -> bool:
    """Return True if the configuration's method, or another field of it, makes a field have no effect."""
    used_with = {
        **dict.fromkeys(_OF_EXPERTS, config.model.kind != "llama"),
        **dict.fromkeys(("inner.momentum", "inner.momentum_share"), config.inner.optimizer == "muon"),
        "inner.min_lr": config.inner.schedule != "constant",
        "mesh.routing": config.mesh.stage > 1,
        "sample_prompt": config.sample_tokens > 0,
    }
    return METHODS[config.method].is_unused(path) or not used_with.get(path, True)
