"""Random configurations: each is refused in one line or can be planned."""

import random
from typing import Any

import pytest

from noloco_jax.config import TrainConfig, from_dict, known_fields, load_config, to_dict
from noloco_jax.config.schema import FieldInfo
from noloco_jax.errors import UserError
from noloco_jax.optim.methods import METHODS
from noloco_jax.spmd.mesh import check_layout, mesh_shape
from support.paths import ROOT

FILE = str(ROOT / "configs/quickstart.py")
FIELDS = known_fields()
ROPE = [name for name in FIELDS if name.startswith("model.rope_scaling.")]
INTS = [-(2**63), -2, -1, 0, 1, 2, 3, 4, 6, 7, 8, 12, 64, 100, 2**31 - 1, 2**31, 2**32, 2**63, 10**30, 10**400]
FLOATS = [-1.0, -0.0, 0.0, 5e-324, 1e-8, 0.5, 1.0, 1.5, 1e308, float("inf"), float("-inf"), float("nan")]
TEXTS = [
    *("", " ", "None", "nan", "1", "0x1", "1_0", "٣", "é\n", "\0", "~", "/", "gs://a", "{}"),
    *("float32", "-1", "x" * 3000),
]
OTHERS: list[Any] = [
    *(None, True, False, [], [1], (2,), {}, {"a": 1}, {1: 2}, {"": 0}, {"lr": 1}, b"a", 1j, object, set()),
]


def any_value(rng: random.Random) -> Any:
    return rng.choice(rng.choice([INTS, FLOATS, TEXTS, OTHERS]))


def value_of(rng: random.Random, field: FieldInfo) -> Any:
    """Return a random value, mostly of the field's type, at the edges of its range and beyond."""
    if rng.random() < 0.15:
        return any_value(rng)
    if field.type is bool:
        return rng.choice([True, False])
    if field.type is str:
        return rng.choice([*field.allowed.choices, *TEXTS]) if rng.random() < 0.5 else field.default
    return rng.choice(INTS if field.type is int else FLOATS)


def changes(rng: random.Random) -> dict[str, Any]:
    """Return random values of a few fields by dotted path, and rarely of an unknown field."""
    chosen = {name: value_of(rng, FIELDS[name]) for name in rng.sample(sorted(FIELDS), rng.choice([1, 2, 2, 3, 5]))}
    if rng.random() < 0.05:  # all or none of this group must be set
        chosen |= {name: value_of(rng, FIELDS[name]) for name in ROPE}
    if rng.random() < 0.05:
        chosen[rng.choice(["model", "modle.dtype", "", ".", "model.", "outer.lr.x", "model.rope_scaling"])] = any_value(
            rng
        )
    return chosen


def plan(config: TrainConfig) -> None:
    """Compute everything a run asks of its configuration before anything is built."""
    method = METHODS[config.method]
    assert method.describe(config.num_replicas, config.outer)
    schedule = config.schedule
    assert (schedule is not None) == method.has_outer_steps
    assert schedule is None or schedule.due(config.num_steps) <= schedule.max_at_once
    for devices in (1, 8, 96):
        try:
            shape = mesh_shape(config.mesh, config.num_replicas, devices)
            fragments = 1 if schedule is None else schedule.fragments
            check_layout(config.model, config.data.batch_size, config.num_microbatches, fragments, shape)
        except UserError as error:
            assert_one_line(error)
        else:
            assert all(type(size) is int and size >= 1 for size in shape.values()), shape
    assert from_dict(to_dict(config)) == config


def assert_one_line(error: UserError) -> None:
    assert error.args, error
    for message in error.args:
        assert message and "\n" not in message and len(message) < 1000, error


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for path, value in flat.items():
        *groups, name = path.split(".")
        group = values
        for part in groups:
            inside = group.setdefault(part, {})
            group = inside if isinstance(inside, dict) else {}
        group[name] = value
    return values


def from_values(chosen: dict[str, Any]) -> TrainConfig:
    return from_dict(nested(chosen))


def from_flags(chosen: dict[str, Any]) -> TrainConfig:
    return load_config(FILE, [f"--config.{path}={value}" for path, value in chosen.items()])


@pytest.mark.filterwarnings("ignore:inner.warmup_steps=.* shortened to")
@pytest.mark.parametrize(("build", "number"), [(from_values, 1500), (from_flags, 500)], ids=["values", "flags"])
def test_a_random_configuration_is_refused_in_one_line_or_can_be_planned(build, number):
    rng, taken = random.Random(0), 0
    for _ in range(number):
        chosen = changes(rng)
        try:
            config = build(chosen)
        except UserError as error:
            assert_one_line(error)
            continue
        plan(config)
        taken += 1
    assert number / 20 < taken < number * 19 / 20  # neither is everything refused, nor nothing
