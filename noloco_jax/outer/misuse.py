"""Places in a program where an outer optimizer cannot do its work, found while the program is traced."""

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any

# Modules of optax whose transforms call the one inside them speculatively or conditionally, with what goes wrong then.
_WRAPPERS = {
    "optax.transforms._accumulation": "optax.MultiSteps would exchange at every micro-step and throw most of it away",
    "optax.transforms._conditionality": (
        "a transform that skips steps by the gradient of one replica would leave the others waiting for its message"
    ),
}


def check_params(params: PyTree, axis_names: Sequence[str]) -> None:
    """Raises unless the parameters are arrays of floating point that differ, by type, between the replicas.

    Args:
      params: of one replica.
      axis_names: the axes of replicas.

    Raises:
      TypeError: if a leaf is of integers or booleans.
      ValueError: if `shard_map` takes the parameters for equal on all replicas.
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
    """The mesh axes over which a value differs, as far as `shard_map` keeps account."""
    return jax.typeof(x).mat.varying


def _is_tracked(axis: str) -> bool:
    """Whether the axis is one of a mesh, in a `shard_map` that checks what varies over it."""
    if axis not in jax.sharding.get_abstract_mesh().manual_axes:
        return False
    return axis in _varying(jax.lax.axis_index(axis))


def check_surroundings() -> None:
    """Raises if the transform is called from inside one that skips or repeats steps, or is not the last of a chain.

    Optax has no way to ask this, so it is read from the calling frames.

    Raises:
      ValueError: if it is.
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
        frame = frame.f_back


def _runs_last(frame: FrameType) -> bool:
    """Return False if a frame is of `optax.chain` or `named_chain` and not at the last of its transforms.

    Any other frame, and one that another version of Optax has written otherwise, counts as the last.
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
