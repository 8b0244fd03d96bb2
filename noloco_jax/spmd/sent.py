"""What a program sends from replica to replica, read from the program as traced, before it is partitioned.

There every message between replicas is written out, as the programs are manual over `replica` and `stage`, with the
size that it has on all `fsdp` and `tensor` devices of a replica together. Nothing is compiled and no devices are
needed: a program traced for one replica a device says what every layout of the run has to send between replicas. Which
branch of a `lax.switch` is taken follows from the program's own integers, which are computed beside the count.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

REPLICA = "replica"
Program = Any  # a traced program with its constants
_Closed: Any = core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]

# What a collective over n replicas sends in all of them together, for every byte of one device's operand, as a ring.
_SENT: dict[str, Callable[[int], int]] = {
    "psum": lambda n: 2 * (n - 1),
    "psum_invariant": lambda n: 2 * (n - 1),
    "pmax": lambda n: 2 * (n - 1),
    "pmin": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n * (n - 1),
    "reduce_scatter": lambda n: n - 1,
    "all_to_all": lambda n: n - 1,
}


def bytes_between_replicas(
    program: Program, position: int, values: Sequence[int] | np.ndarray, mesh_shape: Mapping[str, int]
) -> np.ndarray:
    """The bytes that all replicas together send to other replicas, int64 (K,), for every value of an input.

    What a replica sends to itself, or from one of its stages to another, is not counted.

    Args:
      program: traced for a mesh with one replica a device along `replica`.
      position: of the int32 scalar, among the program's flat inputs, that decides which branches it takes.
      values: of that input, (K,).
      mesh_shape: size of every axis over which the program is manual.

    Raises:
      ValueError: if the program has a collective over replicas that is not known here, or messages whose branch or
        number of repetitions does not follow from the input.
    """

    def count(value: jax.Array) -> Any:
        arguments = [value if i == position else None for i in range(len(program.jaxpr.invars))]
        return jnp.asarray(_Count(mesh_shape).run(program, arguments)[0])

    with jax.enable_x64(True):  # for the bytes; the program's own integers keep their types
        return np.asarray(jax.jit(jax.vmap(count))(np.asarray(values, np.int32)))


class _Count:
    """Adds up what a program sends, and follows its integers. A value that is not followed is None."""

    def __init__(self, mesh_shape: Mapping[str, int]):
        self._shape = mesh_shape

    def run(self, program: Program, arguments: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The bytes sent, and the values of the outputs as far as they follow from those of the arguments."""
        known: dict[Any, Any] = {}

        def read(atom: Any) -> Any:
            if isinstance(atom, core.Literal):
                return np.asarray(atom.val, _aval(atom).dtype) if _is_followed(atom) else None
            return known.get(atom)

        def write(variables: Sequence[Any], values: Sequence[Any]) -> None:
            for variable, value in zip(variables, values, strict=True):
                # Inside `shard_map` an array of another shape is a part that differs between devices.
                if value is not None and _is_followed(variable) and np.shape(value) == variable.aval.shape:
                    known[variable] = value

        write(program.jaxpr.constvars, program.consts)
        write(program.jaxpr.invars, arguments)
        total: Any = np.int64(0)
        for equation in program.jaxpr.eqns:
            sent, values = self._equation(equation, [read(atom) for atom in equation.invars])
            total = total + sent
            write(equation.outvars, values)
        return total, [read(atom) for atom in program.jaxpr.outvars]

    def _equation(self, equation: core.JaxprEqn, arguments: list[Any]) -> tuple[Any, list[Any]]:
        name, inner = equation.primitive.name, list(_programs_in(equation.params))
        unknown = [None] * len(equation.outvars)
        if name == "cond":
            return self._conditional(inner, *arguments), unknown
        if name == "scan":
            return self._scan(equation, inner[0], arguments)
        if len(inner) == 1 and len(inner[0].jaxpr.invars) == len(arguments):  # a call
            return self.run(inner[0], arguments)
        if inner:
            for program in inner:
                self._refuse_messages(program, name)
            return np.int64(0), unknown
        if axes := _axes_of(equation):
            return self._collective(equation, axes), unknown
        if any(value is None for value in arguments) or not all(map(_is_followed, equation.outvars)):
            return np.int64(0), unknown
        values = equation.primitive.bind(*arguments, **equation.params)
        return np.int64(0), list(values) if equation.primitive.multiple_results else [values]

    def _conditional(self, branches: Sequence[Program], index: Any, *arguments: Any) -> Any:
        counts = [self.run(branch, arguments)[0] for branch in branches]
        if all(isinstance(count, np.integer) and count == counts[0] for count in counts):
            return counts[0]
        if index is None:
            raise ValueError("which branch of a conditional sends messages does not follow from the program's input")
        return jnp.stack(list(map(jnp.asarray, counts)))[index]

    def _scan(self, equation: core.JaxprEqn, body: Program, arguments: list[Any]) -> tuple[Any, list[Any]]:
        """Inputs are constants, what is carried from one pass to the next, which is not followed, and columns."""
        start = _gain_an_axis(equation.invars, body.jaxpr.invars).count(False)
        num_carried = _gain_an_axis(equation.outvars, body.jaxpr.outvars).count(False)
        constants, columns = arguments[: start - num_carried], arguments[start:]

        def one(columns: list[Any]) -> tuple[Any, list[Any]]:
            sent, values = self.run(body, [*constants, *[None] * num_carried, *columns])
            return jnp.asarray(sent), values[num_carried:]

        length = equation.params["length"]
        if all(column is None for column in columns):
            return length * one(columns)[0], [None] * len(equation.outvars)
        sent, values = jax.vmap(one, axis_size=length)(columns)
        return sent.sum(), [*[None] * num_carried, *values]

    def _collective(self, equation: core.JaxprEqn, axes: tuple[str, ...]) -> np.int64:
        name = equation.primitive.name
        if name == "axis_index" or REPLICA not in axes:
            return np.int64(0)
        # Every position along the other manual axes has messages of its own.
        copies = math.prod(length for axis, length in self._shape.items() if axis not in axes)
        size = copies * sum(math.prod(x.shape) * x.dtype.itemsize for x in map(_aval, equation.invars))
        if name == "ppermute":
            lengths = [self._shape[axis] for axis in axes]
            pairs = np.asarray(equation.params["perm"], int).reshape(-1, 2)
            replicas = np.unravel_index(pairs, lengths)[axes.index(REPLICA)]
            return np.int64(size * np.sum(replicas[:, 0] != replicas[:, 1]))
        if name not in _SENT or equation.params.get("axis_index_groups") is not None:
            raise ValueError(f"how much {name} over {' and '.join(axes)} sends between replicas is not known here")
        return np.int64(size * _SENT[name](self._shape[REPLICA]))

    def _refuse_messages(self, program: Program, name: str) -> None:
        sent, _ = self.run(program, [None] * len(program.jaxpr.invars))
        if not (isinstance(sent, np.integer) and sent == 0):
            raise ValueError(f"messages between replicas are in a {name}: how often they are sent is not known")


def _programs_in(parameters: Mapping[str, Any]) -> Iterator[Program]:
    """The programs that an equation runs."""
    for value in parameters.values():
        for entry in value if isinstance(value, tuple | list) else (value,):
            if isinstance(entry, _Closed):
                yield entry
            elif isinstance(entry, core.Jaxpr):
                yield _Closed(entry, ())


def _axes_of(equation: core.JaxprEqn) -> tuple[str, ...]:
    """The named axes that an equation is over; none, but for collectives."""
    axes = equation.params.get("axis_name", equation.params.get("axes", ()))
    return tuple(axis for axis in (axes if isinstance(axes, tuple) else (axes,)) if isinstance(axis, str))


def _gain_an_axis(outer: Sequence[Any], inner: Sequence[Any]) -> list[bool]:
    """Which of a scan's inputs or outputs it cuts into, or makes of, one a pass."""
    return [len(x.aval.shape) > len(y.aval.shape) for x, y in zip(outer, inner, strict=True)]


def _aval(atom: Any) -> Any:
    """What is known of an array before its values."""
    return atom.aval


def _is_followed(atom: Any) -> bool:
    """Whether it is an integer or a truth value, or an array of them: other numbers decide nothing."""
    dtype = getattr(_aval(atom), "dtype", None)
    return dtype is not None and (jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_))
