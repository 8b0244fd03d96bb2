"""Signs of a diverging run: a warning about the loss, none without cause, and states that are not finite."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from noloco_jax.checkpoint import elastic
from noloco_jax.errors import UserError
from noloco_jax.metrics.divergence import Rise, is_finite
from noloco_jax.train.resume import restored_state


def warned_steps(losses):
    rise = Rise()
    return [step for step, loss in enumerate(losses, 1) if rise.told(step, loss)]


def noisy(losses, seed):
    """Vary losses by a quarter, in part from document to document of ten steps, as those of 256 bytes a step do."""
    rng = np.random.default_rng(seed)
    documents = np.repeat(rng.normal(size=len(losses) // 10), 10)
    return losses * (1 + 0.22 * rng.normal(size=len(losses)) + 0.08 * documents)


@pytest.mark.parametrize("seed", range(4))
def test_a_noisy_falling_or_constant_loss_does_not_warn(seed):
    assert warned_steps(noisy(np.linspace(6, 2, 2000), seed)) == []
    assert warned_steps(noisy(np.full(2000, 2.0), seed)) == []


def test_a_rise_in_the_first_steps_does_not_warn():
    assert warned_steps(np.concatenate([np.linspace(5, 9, 40), np.full(200, 4.0)])) == []


def test_a_rising_loss_warns_once_per_twenty_percent():
    """From 2.0 to 4.0 the loss rises by 20 % three times: 1.2^3 = 1.73."""
    losses = np.concatenate([np.full(300, 2.0), np.linspace(2, 4, 300), np.full(100, 4.0)])
    steps = warned_steps(losses)
    assert len(steps) == 3
    assert 400 <= steps[0] <= 450


def test_the_warning_names_the_lowest_loss_and_the_setting_to_lower():
    rise = Rise()
    lines = [line for step in range(1, 400) if (line := rise.told(step, 2.0 if step < 200 else 5.0))]
    assert "2.00 at step" in lines[0] and "inner.lr" in lines[0]


def state(dtype: Any, spread: P, value: float, place: int) -> dict[str, Any]:
    values = np.ones((4, 3), np.float32)
    values.flat[place] = value
    mesh = jax.make_mesh((4,), ("replica",), devices=jax.devices()[:4])
    there = NamedSharding(mesh, spread)
    return {"steps": jnp.asarray(7), "name": "x", "w": jax.device_put(jnp.asarray(values, dtype), there)}


@pytest.mark.parametrize("place", [0, 5, 11])
@pytest.mark.parametrize("spread", [P("replica"), P()], ids=["spread", "everywhere"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_single_non_finite_value_is_found_on_any_device(dtype, spread, place):
    assert is_finite(state(dtype, spread, 1e30, place))
    for value in (np.nan, np.inf, -np.inf):
        assert not is_finite(state(dtype, spread, value, place))


def test_resuming_from_a_checkpoint_with_non_finite_values_is_refused(monkeypatch):
    restored = state(jnp.float32, P("replica"), np.nan, 5)
    monkeypatch.setattr(elastic, "restore", lambda *_: (restored, ""))
    nothing: Any = None
    with pytest.raises(UserError, match=r"checkpoint of step 5 has values that are not finite.*--from_step"):
        saved: Any = SimpleNamespace(step=5)
        restored_state(nothing, nothing, nothing, saved, None, Console(quiet=True))
