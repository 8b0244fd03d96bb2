"""Checks, while a program is traced, that the outer optimizer is used where it can work."""

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any

_MOVES_AFTERWARDS = (
    "a transform that makes the weights of what the outer step returns, such as a lookahead or an average, would leave "
    "replicas apart that have averaged"
)
# Optax modules whose transforms cannot stand around an outer step -> what goes wrong then.
_WRAPPERS = {
    "optax.transforms._accumulation": "optax.MultiSteps would exchange at every micro-step and throw most of it away",
    "optax.transforms._conditionality": (
        "a transform that skips steps by the gradient of one replica would leave the others waiting for its message"
    ),
    "optax._src.lookahead": _MOVES_AFTERWARDS,
    "optax.contrib._mechanic": _MOVES_AFTERWARDS,
    "optax.contrib._sam": "optax.contrib.sam steps away from the weights and back, and would exchange there too",
    "optax.contrib._schedule_free": _MOVES_AFTERWARDS,
}
# Optax modules whose optimizers compute weights from the first ones and a sum of gradients, not from the last ones.
_FROM_THE_FIRST = {"optax.contrib._cocob": "optax.contrib.cocob", "optax.contrib._madgrad": "optax.contrib.madgrad"}


def check_params(params: PyTree, axis_names: Sequence[str]) -> None:
    """Check that the parameters are floating-point arrays whose type lets them differ between replicas.

    Args:
      params: parameters of one replica.
      axis_names: the axes of replicas.

    Raises:
      TypeError: if a leaf holds integers or booleans.
      ValueError: if the parameters are typed as equal on all replicas in `shard_map`.
    """
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path) or "the parameter"
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TypeError(
                f"{name} is of {leaf.dtype} and has no mean over replicas: keep it out of the parameters, or wrap the "
                "outer optimizer in optax.masked"
            )
        fixed = [axis for axis in axis_names if _is_tracked(axis) and axis not in _varying(leaf)]
        if fixed:
            raise ValueError(
                f"{name} is the same on all devices of axis {fixed[0]!r} by its type, so that jax.grad sums its "
                f"gradient over them at every step: pass parameters and state through shard_map with "
                f"in_specs=P({fixed[0]!r}), replicas leading, or cast them by jax.lax.pcast(..., to='varying') "
                "before the gradient is taken"
            )


def _varying(x: Any) -> frozenset[str]:
    """Return the mesh axes over which a value may differ, as `shard_map` tracks them."""
    return jax.typeof(x).mat.varying


def _is_tracked(axis: str) -> bool:
    """Return True for a mesh axis in a `shard_map` that tracks varying values (`check_vma`)."""
    if axis not in jax.sharding.get_abstract_mesh().manual_axes:
        return False
    return axis in _varying(jax.lax.axis_index(axis))


def check_surroundings() -> None:
    """Check that no transform around this one skips or repeats steps, and that this one is the last of its chain.

    Optax does not expose the enclosing transforms, so they are read from the calling frames.

    Raises:
      ValueError: if the transform is wrapped like that, is not the last of its chain, or follows one that undoes it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module in _WRAPPERS:
            raise ValueError(
                f"{_WRAPPERS[module]}: put the wrapper around the inner optimizer alone and chain the outer one behind "
                "it, or take the outer step in a program of its own with outer.step(params, state)"
            )
        if module == "optax.transforms._combining" and not _runs_last(frame):
            raise ValueError(
                "the outer optimizer is not the last of its optax.chain, and so does not see the step that the weights "
                "make: move it to the end"
            )
        if module == "optax.transforms._combining" and (before := _from_the_first(frame)):
            raise ValueError(
                f"{before} computes the weights from the first ones and its sum of gradients, so that its next step "
                "undoes the outer step: take another inner optimizer"
            )
        frame = frame.f_back


def _runs_last(frame: FrameType) -> bool:
    """Return False for a frame of `optax.chain` or `named_chain` that is not calling its last transform.

    Any other frame, including an unknown layout in another version of Optax, counts as the last.
    """
    names = frame.f_locals
    try:
        match frame.f_code.co_qualname.partition(".")[0]:
            case "chain":
                return names["fn"] is names["update_fns"][-1]
            case "named_chain":
                return names["tx"] is names["transforms"][-1][1]
    except (LookupError, TypeError):
        pass
    return True


def _from_the_first(frame: FrameType) -> str | None:
    """Return the name of a transform in `_FROM_THE_FIRST` ahead of this one in a chain, by its state; None without."""
    states = frame.f_locals.get("state")
    states = [*states.values()] if isinstance(states, dict) else states
    if not isinstance(states, list | tuple):
        return None
    parts = jax.tree.leaves(states[:-1], is_leaf=lambda part: type(part).__module__ in _FROM_THE_FIRST)
    return next(filter(None, (_FROM_THE_FIRST.get(type(part).__module__) for part in parts)), None)
