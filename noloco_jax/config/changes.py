"""Differences between two configurations of a run, and settings that its method ignores."""

from typing import Any, NamedTuple

from noloco_jax.config.build import known_fields, to_dict
from noloco_jax.config.fields import TrainConfig
from noloco_jax.config.schema import OnResume, field_at, flatten
from noloco_jax.methods import METHODS
from noloco_jax.wires import MODULO_BITS

_OF_EXPERTS = ("model.num_experts", "model.experts_per_token", "model.norm_topk_prob", "model.router_aux_loss_coef")


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
        Change(path, left.get(path), right.get(path), _on_resume(path, field.on_resume, before, now))
        for path in dict.fromkeys([*left, *right])
        if (field := field_at(TrainConfig, path)) is not None
        and left.get(path) != right.get(path)
        and not all(_is_unused(config, path) for config in (before, now))
    ]


def _on_resume(path: str, usual: OnResume, before: TrainConfig, now: TrainConfig) -> OnResume:
    """Return "must match" for a change that adds arrays to the state in a checkpoint, or removes them."""
    left, right = before.outer, now.outer
    if path == "outer.wire" and (left.wire in MODULO_BITS) != (right.wire in MODULO_BITS):
        return "must match"
    return usual


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
        "inner.momentum": config.inner.optimizer == "muon",
        "inner.decay_share": config.inner.schedule == "wsd",
        "inner.min_lr": config.inner.schedule != "constant",
        "data.shuffle_buffer": config.data.kind != "text" or config.data.shuffle_buffer == 1,
        "mesh.routing": config.mesh.stage > 1,
        "sample_prompt": config.sample_tokens > 0,
    }
    return METHODS[config.method].is_unused(path) or not used_with.get(path, True)


def default_settings(config: TrainConfig) -> list[str]:
    """Return "FIELD=VALUE" of every field of `outer` whose value is the default of the configuration's method."""
    defaults, outer = METHODS[config.method].defaults, config.outer
    return [
        f"{name}={value}" for name, value in defaults.items() if value is not None and getattr(outer, name) == value
    ]
