"""Shares of a state: the arrays from which an island catches up, in pieces of bytes that several donors can give.

Weights travel as absolute values. A modulo format carries differences alone, and the error of blocks of 4 bits is a
share of the weights, not of the distance between replicas, which costs perplexity (bench/MEASURED.md): runs with a
format of fewer than 8 bits send weights in int8.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from noloco_jax.exchange.wire import from_code, to_code, wire_of
from noloco_jax.islands.frames import ArraySpec
from noloco_jax.islands.payload import host_of

SHARE_BYTES = 256 << 10  # two seconds at 1 Mbit/s
MOST_SHARES = 4096
_BYTE = np.dtype(np.uint8)
_FEWEST_QUANTIZED = 4096  # values of an array; norms and biases are few, and are sent exactly
_FEWEST_SHARED = 1024  # bytes of an array that is no weight; counters and keys must be of one moment
_SCALE_BYTES = 2


def state_wire(wire: str) -> str:
    """Return the format in which weights travel to an island that catches up, for a run with that wire format."""
    return wire if wire in ("float32", "bfloat16") else "int8"


class _Part(NamedTuple):
    """Place of an array in the bytes of a state.

    Attributes:
      leaf: number of the array.
      wire: its format.
      code: spec of what travels.
      start, stop: its bytes.
      unit: bytes that stay in one share.
    """

    leaf: int
    wire: str
    code: ArraySpec
    start: int
    stop: int
    unit: int


class StateLayout:
    """Layout of the arrays that travel of a state.

    Share 0 is the position: the number of inner steps, and small arrays which must be of the same moment as it. All
    other shares are parts of the shared arrays' bytes, cut between values or blocks.

    Args:
      specs: specs of all arrays of the state.
      shared: numbers of the arrays in shares.
      small: numbers of the arrays that travel with the position.
      wire: format of the shared arrays of floating-point numbers.
    """

    def __init__(self, specs: Sequence[ArraySpec], shared: Sequence[int], small: Sequence[int], wire: str = "float32"):
        self._specs, self._small = list(specs), list(small)
        self._parts: list[_Part] = []
        self._total = 0
        for leaf in shared:
            self._parts.append(_part(leaf, specs[leaf], wire, self._total))
            self._total = self._parts[-1].stop
        self._bounds = self._cut(max(SHARE_BYTES, -(-self._total // MOST_SHARES)))

    @property
    def count(self) -> int:
        """Number of shares, without the position."""
        return len(self._bounds) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of all shares."""
        return self._total

    @property
    def shared(self) -> list[int]:
        """Numbers of the arrays in shares."""
        return [part.leaf for part in self._parts]

    @property
    def small(self) -> list[int]:
        """Numbers of the arrays that travel with the position."""
        return list(self._small)

    def specs(self, number: int) -> list[ArraySpec]:
        """Return the specs of the arrays of a share, which must exist."""
        if number == 0:
            return [ArraySpec((), np.dtype(np.int64)), *(self._specs[leaf] for leaf in self._small)]
        return [ArraySpec((self._bounds[number] - self._bounds[number - 1],), _BYTE)]

    def encode(self, leaves: dict[int, np.ndarray]) -> np.ndarray:
        """Return the bytes of the shared arrays, each of which is removed from `leaves` as soon as it is encoded."""
        content = np.empty(self._total, _BYTE)
        for part in self._parts:
            content[part.start : part.stop] = _encoded(part, leaves.pop(part.leaf))
        return content

    def share(self, content: np.ndarray, number: int) -> np.ndarray:
        """Return the bytes of a share."""
        return content[self._bounds[number - 1] : self._bounds[number]]

    def is_finite(self, number: int, share: np.ndarray) -> bool:
        """Return whether all values of a share are finite."""
        first, last = self._bounds[number - 1], self._bounds[number]
        overlaps = ((part, max(part.start, first), min(part.stop, last)) for part in self._parts)
        return all(
            _is_finite(part, share[start - first : stop - first]) for part, start, stop in overlaps if start < stop
        )

    def decode(self, content: np.ndarray) -> dict[int, np.ndarray]:
        """Return the shared arrays by their numbers."""
        return {
            part.leaf: _decoded(part, self._specs[part.leaf], content[part.start : part.stop]) for part in self._parts
        }

    def _cut(self, size: int) -> list[int]:
        bounds, parts = [0], iter(self._parts)
        part = next(parts, None)
        while part is not None and self._total - bounds[-1] > size:
            target = bounds[-1] + size
            while part.stop <= target:
                part = next(parts)
            bounds.append(part.start + (target - part.start) // part.unit * part.unit)
        return bounds if bounds[-1] == self._total else [*bounds, self._total]


@dataclass(frozen=True)
class StateLayouts:
    """Layouts of what an island that catches up may ask for: the `whole` state exactly, or the `weights` alone."""

    whole: StateLayout
    weights: StateLayout

    def of(self, is_whole: bool) -> StateLayout:
        return self.whole if is_whole else self.weights


def layouts_of(state: Any, num_weights: int, wire: str, carried: Sequence[int] = ()) -> StateLayouts:
    """Return the layouts of a state.

    Args:
      state: arrays or shapes.
      num_weights: the number of arrays, the first ones, that are weights.
      wire: wire format of the run's messages.
      carried: numbers of further arrays that travel with the weights.
    """
    specs = [ArraySpec(tuple(x.shape), np.dtype(x.dtype)) for x in jax.tree.leaves(state)]
    small = [leaf for leaf, spec in enumerate(specs) if leaf >= num_weights and spec.nbytes < _FEWEST_SHARED]
    shared = [leaf for leaf in range(len(specs)) if leaf not in set(small)]
    return StateLayouts(
        StateLayout(specs, shared, small),
        StateLayout(specs, range(num_weights), carried, state_wire(wire)),
    )


class Assembly:
    """Shares that have come.

    Args:
      layout: their layout.
    """

    def __init__(self, layout: StateLayout):
        self._layout = layout
        self._content = np.empty(layout.nbytes, _BYTE)

    def put(self, number: int, share: np.ndarray) -> None:
        self._layout.share(self._content, number)[:] = share

    def leaves(self, small: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
        """Return all arrays by their numbers, once every share has come; `small` came with the position."""
        return self._layout.decode(self._content) | dict(zip(self._layout.small, small, strict=True))


def _part(leaf: int, spec: ArraySpec, wire: str, start: int) -> _Part:
    is_real = np.issubdtype(spec.dtype, np.floating) or spec.dtype == ml_dtypes.bfloat16
    size = spec.nbytes // spec.dtype.itemsize
    if not is_real or wire == "float32" or size < _FEWEST_QUANTIZED or spec.dtype.itemsize <= 1:
        return _Part(leaf, "float32", spec, start, start + spec.nbytes, spec.dtype.itemsize)
    if wire == "bfloat16":
        code = ArraySpec(spec.shape, np.dtype(ml_dtypes.bfloat16))
        return _Part(leaf, wire, code, start, start + code.nbytes, code.dtype.itemsize)
    made = jax.eval_shape(functools.partial(_code, wire), jax.ShapeDtypeStruct(spec.shape, np.float32))
    code = ArraySpec(tuple(made.shape), np.dtype(made.dtype))
    return _Part(leaf, wire, code, start, start + code.nbytes, code.shape[-1])


def _encoded(part: _Part, array: np.ndarray) -> np.ndarray:
    if part.wire in ("float32", "bfloat16"):
        return np.ascontiguousarray(array.astype(part.code.dtype, copy=False)).reshape(-1).view(_BYTE)
    x = jax.device_put(array.astype(np.float32, copy=False), host_of(part.wire))
    return np.asarray(_encode(part.wire, x)).reshape(-1)


def _decoded(part: _Part, spec: ArraySpec, content: np.ndarray) -> np.ndarray:
    code = content.view(part.code.dtype).reshape(part.code.shape)
    if part.wire in ("float32", "bfloat16"):
        return code.astype(spec.dtype)
    return np.asarray(_decode(part.wire, spec.shape, jax.device_put(code, host_of(part.wire)))).astype(spec.dtype)


def _is_finite(part: _Part, content: np.ndarray) -> bool:
    if part.wire not in ("float32", "bfloat16"):  # a block with a value that is not finite has such a scale
        scales = np.ascontiguousarray(content.reshape(-1, part.unit)[:, :_SCALE_BYTES])
        return bool(np.isfinite(scales.view(ml_dtypes.bfloat16).astype(np.float32)).all())
    if part.code.dtype.kind in "iub":
        return True
    values = np.ascontiguousarray(content).view(part.code.dtype)
    return bool(np.isfinite(values if part.code.dtype.kind in "fc" else values.astype(np.float32)).all())


def _code(wire: str, x: jax.Array) -> jax.Array:
    format: Any = wire_of(wire)
    return format.encode(to_code(format, x))


_encode = jax.jit(_code, static_argnums=0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode(wire: str, shape: tuple[int, ...], code: jax.Array) -> jax.Array:
    format: Any = wire_of(wire)
    return from_code(format, format.decode(code), jax.ShapeDtypeStruct(shape, np.float32))
