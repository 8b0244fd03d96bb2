"""Collectives of a program, read from its jaxpr.

Every collective across `replica` and `stage` is written by hand, so that the jaxpr has them all. Those that XLA's
partitioner adds for `fsdp` and `tensor`, inside a replica, are not among them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

# JAX's primitives, and their parameter that names the axes.
_AXES_PARAMETER = {
    "ppermute": "axis_name",
    "psum": "axes",
    "psum_invariant": "axes",
    "pmax": "axes",
    "pmin": "axes",
    "all_gather": "axis_name",
    "all_gather_invariant": "axis_name",
    "reduce_scatter": "axis_name",
    "all_to_all": "axis_name",
}
_INSIDE_A_REPLICA = ("fsdp", "tensor")
_REDUCTIONS = ("psum", "psum_invariant", "pmax", "pmin")


class Collective(NamedTuple):
    """One collective operation of a program.

    Attributes:
      operation: the name of JAX's primitive.
      axes: the mesh axes in which devices that exchange data differ.
      bytes: bytes of its operands on one device.
      sent: bytes that a device sends to devices of other replicas, the mean over the devices. Reductions and gathers
        count as rings.
      times: how often it runs in a run of the program, on each of a replica's devices where it is written for them. The
        branches of a conditional count as equally likely.
    """

    operation: str
    axes: tuple[str, ...]
    bytes: int
    sent: Fraction
    times: Fraction


def collectives_of(program: Any, arguments: tuple[Any, ...], mesh_shape: Mapping[str, int]) -> list[Collective]:
    """Return the collectives of a program by which devices exchange data, in its order.

    Args:
      program: a jitted function.
      arguments: shapes of its arguments.
      mesh_shape: mesh axis -> number of devices.

    Raises:
      ValueError: if one is in a loop of unknown length.
    """
    jaxpr = jax.make_jaxpr(program)(*arguments).jaxpr
    found = (_collective(equation, times, mesh_shape) for equation, times in _equations(jaxpr, Fraction(1), mesh_shape))
    return [one for one in found if one.axes]


def bytes_sent(found: Iterable[Collective]) -> Fraction:
    """Return the bytes that a device sends to devices of other replicas in a run of the program."""
    return sum((one.times * one.sent for one in found), Fraction(0))


def _equations(jaxpr: Any, times: Fraction, mesh_shape: Mapping[str, int]) -> Iterator[tuple[Any, Fraction]]:
    """Yield the equations of collectives, and how often each runs."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _AXES_PARAMETER:
            yield equation, times
            continue
        bodies = [body for value in equation.params.values() for body in _jaxprs(value)]
        inner = times * equation.params["length"] if name == "scan" else times / (len(bodies) if name == "cond" else 1)
        if name == "shard_map":
            manual = equation.params["newly_manual_axes"]
            inner *= math.prod(mesh_shape[axis] for axis in manual if axis in _INSIDE_A_REPLICA)
        for body in bodies:
            for found in _equations(body, inner, mesh_shape):
                if name == "while":
                    raise ValueError(f"{found[0].primitive.name} is in a loop of unknown length: use lax.scan")
                yield found


def _jaxprs(value: Any) -> Iterator[Any]:
    for part in value if isinstance(value, tuple | list) else (value,):
        body = getattr(part, "jaxpr", part)
        if isinstance(body, core.Jaxpr):
            yield body


def _collective(equation: Any, times: Fraction, mesh_shape: Mapping[str, int]) -> Collective:
    operation = equation.primitive.name
    named = equation.params[_AXES_PARAMETER[operation]]
    axes = [axis for axis in (named if isinstance(named, tuple | list) else (named,)) if axis in mesh_shape]
    sizes = [mesh_shape[axis] for axis in axes]
    size, number = sum(x.aval.size * x.aval.dtype.itemsize for x in equation.invars), math.prod(sizes)
    if operation == "ppermute":
        ends = np.unravel_index(np.array(equation.params["perm"], int).reshape(-1, 2), sizes)
        differing = {axis: int((where[:, 0] != where[:, 1]).sum()) for axis, where in zip(axes, ends, strict=True)}
        senders = Fraction(differing.get("replica", 0), number)
        return Collective(operation, tuple(axis for axis in axes if differing[axis]), size, size * senders, times)
    crossed = tuple(axis for axis in axes if mesh_shape[axis] > 1)
    groups = [*map(len, equation.params.get("axis_index_groups") or ())] or [number]
    parts = 1 + (operation in _REDUCTIONS)  # of 1/n of the operand, sent to each other member of a group of n
    copies = sum((n - 1) * (n if operation.startswith("all_gather") else parts) for n in groups)
    return Collective(operation, crossed, size, Fraction(size * copies * ("replica" in crossed), number), times)
