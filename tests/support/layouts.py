"""The three places where replicas can live, for tests: slots of one device, devices, or slots of several devices."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from noloco_jax.optim.exchange.axes import AxisName
from noloco_jax.optim.rule import Momentum, OuterState

PyTree = Any
Layout = int | tuple[int, int]  # N slots of one device, or (devices D, slots L of each)
LAYOUTS: dict[str, Layout] = {"virtual": 8, "devices": (8, 1), "several a device": (4, 2)}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def axis_of(layout: Layout) -> AxisName:
    """The `axis_name` of the layout: a vmap axis, a mesh axis, or the pair."""
    return "replica" if isinstance(layout, int) or layout[1] == 1 else ("replica", "slot")


def some_devices(count: int) -> list:
    """So many devices; the test skips where there are fewer, as on one GPU."""
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} devices, and there are {len(jax.devices())}")
    return jax.devices()[:count]


def mesh_of(num_devices: int) -> jax.sharding.Mesh:
    return jax.make_mesh((num_devices,), ("replica",), (AxisType.Auto,), devices=some_devices(num_devices))


def over_replicas(fn: Callable[..., PyTree], layout: Layout) -> Callable[..., PyTree]:
    """`fn` of one replica as a function of stacked trees, replicas leading."""
    if isinstance(layout, int):
        return jax.vmap(fn, axis_name="replica", axis_size=layout)
    num_devices, num_slots = layout
    if num_slots > 1:
        block, check_vma = jax.vmap(fn, axis_name="slot", axis_size=num_slots), False
    else:

        def block(*trees: PyTree) -> PyTree:
            result = fn(*jax.tree.map(lambda x: x[0], trees))
            return jax.tree.map(lambda x: x[None], result)

        check_vma = True
    specs = {"in_specs": P("replica"), "out_specs": P("replica"), "check_vma": check_vma}
    return jax.shard_map(block, mesh=mesh_of(num_devices), **specs)


def random_tree(seed: int, num_replicas: int) -> dict[str, np.ndarray]:
    """A small model's float32 arrays, with a scalar among them."""
    rng = np.random.default_rng(seed)
    shapes = {"matrix": (3, 4), "scalar": ()}
    return {name: rng.normal(size=(num_replicas, *shape)).astype(np.float32) for name, shape in shapes.items()}


def state_at_start(num_replicas: int, slow: PyTree, momentum: PyTree) -> Any:
    """An `OuterState` of stacked numpy arrays before the first inner step."""
    zeros: Any = np.zeros(num_replicas, np.int32)
    return OuterState(zeros, zeros, Momentum(slow, momentum))


def assert_trees_close(actual: PyTree, expected: PyTree, rtol: float = 1e-6, atol: float = 1e-6) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), actual, expected)


def has_branch(fn: Callable[..., PyTree], *args: PyTree) -> bool:
    """Return True if a program has a conditional; one that depends on the replica is a select."""
    return any(eqn.primitive.name == "cond" for eqn in unconditional(jax.make_jaxpr(fn)(*args).jaxpr))


def unconditional(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """The equations that a program runs whatever its predicates say: into its calls, not into its conditionals."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name != "cond":
            for inner in core.jaxprs_in_params(eqn.params):
                yield from unconditional(inner)
