"""States that are not finite, on devices and in host memory."""

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
from noloco_jax.metrics.finite import is_finite
from noloco_jax.train.phases import first_state


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
    config, flags = SimpleNamespace(model=None, elastic=""), SimpleNamespace(from_step=None)
    setup: Any = SimpleNamespace(config=config, flags=flags, console=Console(quiet=True))
    opened: Any = SimpleNamespace(saved=SimpleNamespace(step=5), checkpoints=None)
    nothing: Any = None
    with pytest.raises(UserError, match=r"checkpoint of step 5 has values that are not finite.*--from_step"):
        first_state(setup, opened, nothing, None)
