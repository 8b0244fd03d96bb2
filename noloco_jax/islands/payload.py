"""Arrays as bytes: messages between islands, and weights and states for those that catch up or merge.

Messages are encoded by the program that makes them, and decoded here, on the host's own processor and beside the loop
of the network: neither the accelerator nor the training is held up. A modulo format is encoded here too, once the
partner's windows are there.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from noloco_jax.errors import UserError
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.exchange import ProtocolError
from noloco_jax.islands.interfaces import Codec, Read
from noloco_jax.optim.exchange.modulo import BROKEN, Modulo, correct_in, encode_in
from noloco_jax.optim.exchange.wire import Wire, decode

PyTree = Any
MAX_WINDOW = 32  # more than the partner's, in quarters of a power of two
SMALL_BYTES, ALL_SMALL_BYTES = 4096, 1 << 20  # of an array that travels with the position, and of all of them
_BLOCK = 256  # values that share a scale, for weights in 8 bits
EXACT, CATCH_UP = pb.WeightsRequest.EXACT, pb.WeightsRequest.CATCH_UP


class ArraySpec(NamedTuple):
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


class Message(NamedTuple):
    """Message of an outer step, as its program made it: see `LocalPrograms.step`.

    Attributes:
      number: of the outer step.
      arrays: the payload; of a modulo format, the proposed windows and the message.
    """

    number: int
    arrays: list[np.ndarray]


def specs_of(tree: PyTree) -> list[ArraySpec]:
    """Return the specs of arrays like the leaves of a tree."""
    return [ArraySpec(tuple(x.shape), np.dtype(x.dtype)) for x in jax.tree.leaves(tree)]


def pack(arrays: Sequence[np.ndarray]) -> bytes:
    """Return the bytes of arrays, one after another."""
    return b"".join(np.ascontiguousarray(x).tobytes() for x in arrays)


def unpack(data: bytes | memoryview, specs: Sequence[ArraySpec]) -> list[np.ndarray]:
    """Return arrays from their bytes, read-only views; raise `ProtocolError` for another number of bytes."""
    if len(data) != sum(spec.nbytes for spec in specs):
        raise ProtocolError(f"{len(data)} bytes of arrays that have {sum(spec.nbytes for spec in specs)}")
    arrays, start = [], 0
    for spec in specs:
        bits = np.frombuffer(data, np.uint8, spec.nbytes, start)
        arrays.append(bits.view(spec.dtype).reshape(spec.shape))
        start += spec.nbytes
    return arrays


def codec_of(wire: Wire | Modulo, message: PyTree, payload: PyTree, dims: PyTree) -> Codec:
    """Return the codec of a wire format; see `LocalPrograms` for its parts.

    Args:
      wire: the format.
      message: shapes and dtypes of one replica's message.
      payload: the same of what travels; of a modulo format, the windows and the payload.
      dims: the dimension of every array along which the format cuts blocks.

    Raises `UserError` where JAX has been told to use an accelerator alone, and the payload has to be decoded.
    """
    return (
        _WindowCodec(wire, message, payload, dims) if isinstance(wire, Modulo) else _Codec(wire, message, payload, dims)
    )


class _Codec:
    """Codec of formats without windows: of a message Q(m) is the decoded value."""

    def __init__(self, wire: Wire, message: PyTree, payload: PyTree, dims: PyTree):
        self._specs = specs_of(payload)
        self.sizes = (sum(spec.nbytes for spec in self._specs),)
        self._host, structure = _host_of(wire.name), jax.tree.structure(payload)

        def read(own: list[jax.Array], theirs: list[jax.Array]) -> Any:
            mine = decode(wire, structure.unflatten(own), message, dims)
            other = decode(wire, structure.unflatten(theirs), message, dims)
            differences = jax.tree.map(lambda x, y: y.astype(jnp.float32) - x.astype(jnp.float32), mine, other)
            return jax.tree.leaves(differences), optax.tree.norm(other), optax.tree.norm(differences)

        self._read = None if wire.exact else _compiled(read, self._host, payload, payload)

    def part(self, own: Message, number: int, theirs: Sequence[bytes]) -> bytes:
        del number, theirs
        return pack(own.arrays)

    def read(self, own: Message, theirs: Sequence[bytes]) -> Read:
        arrays = unpack(theirs[0], self._specs)
        if self._read is None:
            with np.errstate(all="ignore"):  # what is not finite is refused
                differences = [_float32(y) - _float32(x) for x, y in zip(own.arrays, arrays, strict=True)]
                return Read(differences, _norm(arrays), _norm(differences))
        differences, norm, distance = self._read(*jax.device_put((list(own.arrays), arrays), self._host))
        return Read([np.asarray(x) for x in differences], float(norm), float(distance))

    def correction(self, own: Message, read: Read, weight: float) -> list[np.ndarray]:
        """Return the weighted difference of the decoded messages: with equal weights exactly opposite on both sides."""
        return [np.float32(weight) * x for x in read.arrays]


class _WindowCodec:
    """Codec of modulo formats, whose payloads follow the windows that each of a pair proposes.

    Of a partner's message only the difference to the own one can be known. What it stands for is the own message and
    that difference; blocks that are refused count as equal.
    """

    def __init__(self, wire: Modulo, message: PyTree, payload: PyTree, dims: PyTree):
        windows, codes = payload
        self._windows, self._codes = specs_of(windows), specs_of(codes)
        self.sizes = tuple(sum(spec.nbytes for spec in specs) for specs in (self._windows, self._codes))
        self._host = _host_of(wire.name)
        number = jax.ShapeDtypeStruct((), np.int32)
        of_message, of_windows, of_codes = map(jax.tree.structure, (message, windows, codes))

        def encode(own: list[Any], both: list[Any], number: list[Any]) -> Any:
            return jax.tree.leaves(
                encode_in(wire, of_message.unflatten(own), of_windows.unflatten(both), number[0], dims)
            )

        def read(own: list[Any], both: list[Any], mine: list[Any], theirs: list[Any], number: list[Any]) -> Any:
            mine, theirs, both = of_codes.unflatten(mine), of_codes.unflatten(theirs), of_windows.unflatten(both)
            half, remembered = correct_in(wire, mine, theirs, both, number[0], message, dims)
            differences = [2 * x for x in jax.tree.leaves(half)]
            other = [x + y for x, y in zip(own, differences, strict=True)]
            return differences, jax.tree.leaves(remembered), optax.tree.norm(other), optax.tree.norm(differences)

        self._encode = _compiled(encode, self._host, message, windows, number)
        self._read = _compiled(read, self._host, message, windows, codes, codes, number)

    def part(self, own: Message, number: int, theirs: Sequence[bytes]) -> bytes:
        if number == 0:
            return pack(own.arrays[: len(self._windows)])
        return pack([np.asarray(x) for x in self._encoded(own, self._pair(own, theirs[0]))])

    def read(self, own: Message, theirs: Sequence[bytes]) -> Read:
        both = self._pair(own, theirs[0])
        arguments = [own.arrays[len(self._windows) :], both, list(self._encoded(own, both))]
        arguments += [unpack(theirs[1], self._codes), [np.int32(own.number)]]
        differences, remembered, norm, distance = self._read(*jax.device_put(arguments, self._host))
        return Read([*map(np.asarray, differences), *map(np.asarray, remembered)], float(norm), float(distance))

    def correction(self, own: Message, read: Read, weight: float) -> list[np.ndarray]:
        """Return the weighted differences, and the windows to remember."""
        count = len(own.arrays) - len(self._windows)
        return [*(np.float32(weight) * x for x in read.arrays[:count]), *read.arrays[count:]]

    def _pair(self, own: Message, theirs: bytes) -> list[np.ndarray]:
        return pair_windows(own.arrays[: len(self._windows)], unpack(theirs, self._windows))

    def _encoded(self, own: Message, both: list[np.ndarray]) -> Any:
        arguments = own.arrays[len(self._windows) :], both, [np.int32(own.number)]
        return self._encode(*jax.device_put(arguments, self._host))


def pair_windows(own: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the windows of a pair: the larger of the two proposed for every block, within a limit.

    No window of an array is more than 256 times as wide as the widest that the more modest of the two islands proposes
    for any of its blocks, as rows of which one island has seen no token may have moved in the other alone.
    """

    def of_array(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        larger = np.maximum(mine, theirs)
        widest = min(np.max(x, where=x != BROKEN, initial=0) for x in (mine, theirs))
        capped = np.minimum(larger, min(int(widest) + MAX_WINDOW, BROKEN - 1)).astype(np.uint8)
        return np.where(larger == BROKEN, larger, capped)

    return [of_array(mine, theirs) for mine, theirs in zip(own, others, strict=True)]


class StateCodec:
    """Forms in which a state travels: exact weights, or weights in 8 bits and what travels with them.

    Small arrays beside the weights, such as counters, travel with the position, which comes last.

    Args:
      specs: of all arrays of the state, the weights first.
      num_weights: how many of them are weights.
      carried: numbers of the arrays that travel with weights in 8 bits.

    Attributes:
      weights: specs of the weights.
      small: numbers of the arrays that come with the position.
    """

    def __init__(self, specs: Sequence[ArraySpec], num_weights: int, carried: Sequence[int] = ()):
        self._specs, weights = list(specs), list(range(num_weights))
        self.weights = self._specs[:num_weights]
        self.small, total = list[int](), 0
        for number in sorted(carried, key=lambda number: specs[number].nbytes):
            total += specs[number].nbytes
            if specs[number].nbytes <= SMALL_BYTES and total <= ALL_SMALL_BYTES:
                self.small.append(number)
        self._large: dict[int, list[int]] = {EXACT: weights, CATCH_UP: [*weights, *sorted({*carried} - {*self.small})]}
        self._floats = {n for n in weights if jnp.issubdtype(specs[n].dtype, jnp.floating)}

    def large(self, kind: int) -> list[int]:
        """Return the numbers of the arrays that a form begins with."""
        return self._large[kind]

    def num_bytes(self, kind: int) -> int:
        return sum(self._size(kind, number) for number in self.large(kind))

    def encode(self, kind: int, leaves: Mapping[int, np.ndarray]) -> bytes:
        """Return the bytes of the large arrays."""
        numbers = self.large(kind)
        return b"".join(_quantize(leaves[n]) if self._is_quantized(kind, n) else pack([leaves[n]]) for n in numbers)

    def decode(self, kind: int, data: bytes, small: bytes) -> dict[int, np.ndarray]:
        """Return the arrays by their numbers; raise `ProtocolError` for values that are not finite.

        Args:
          kind: of the form.
          data: the result of `encode`.
          small: the arrays that travel with the position, packed; of exact weights none.
        """
        leaves, start = {}, 0
        for number in self.large(kind):
            spec, size = self._specs[number], self._size(kind, number)
            part, start = data[start : start + size], start + size
            leaves[number] = _dequantize(part, spec) if self._is_quantized(kind, number) else unpack(part, [spec])[0]
        numbers = self.small if kind == CATCH_UP else []
        leaves |= dict(zip(numbers, unpack(small, [self._specs[n] for n in numbers]), strict=True))
        for x in leaves.values():
            if jnp.issubdtype(x.dtype, jnp.inexact) and not np.isfinite(x).all():
                raise ProtocolError("weights that are not finite")
        return leaves

    def _is_quantized(self, kind: int, number: int) -> bool:
        return kind == CATCH_UP and number in self._floats

    def _size(self, kind: int, number: int) -> int:
        spec = self._specs[number]
        if not self._is_quantized(kind, number):
            return spec.nbytes
        count = spec.nbytes // spec.dtype.itemsize
        return count + 4 * -(-count // _BLOCK)


def _quantize(x: np.ndarray) -> bytes:
    """Return an array in 8 bits a value, with a float32 scale for each block."""
    flat = np.asarray(x, np.float32).reshape(-1)
    blocks = np.pad(flat, (0, -len(flat) % _BLOCK)).reshape(-1, _BLOCK)
    scales = np.abs(blocks).max(axis=1, initial=0.0) / np.float32(127)
    with np.errstate(invalid="ignore"):  # what is not finite is refused where it comes
        codes = np.rint(blocks / np.where(scales == 0, 1, scales)[:, None]).astype(np.int8)
    return scales.tobytes() + codes.reshape(-1)[: len(flat)].tobytes()


def _dequantize(data: bytes, spec: ArraySpec) -> np.ndarray:
    count = int(np.prod(spec.shape, dtype=np.int64))
    num_blocks = -(-count // _BLOCK)
    scales = np.frombuffer(data, np.float32, num_blocks)
    codes = np.frombuffer(data, np.int8, count, 4 * num_blocks)
    return (codes * np.repeat(scales, _BLOCK)[:count]).astype(spec.dtype).reshape(spec.shape)


def _norm(arrays: Sequence[np.ndarray]) -> float:
    """Return the Euclidean norm over all arrays; not finite where a value is not."""
    return float(np.sqrt(sum(float(np.linalg.norm(_float32(x).reshape(-1))) ** 2 for x in arrays)))


def _float32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32, copy=False)


def _host_of(wire: str) -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        raise UserError(
            f"JAX has no CPU, on which messages of outer.wire={wire} are decoded: add cpu to JAX_PLATFORMS, as in "
            "cuda,cpu"
        ) from None


def _compiled(function: Callable[..., Any], host: Any, *arguments: PyTree) -> Callable[..., Any]:
    """Compile a function of lists of arrays ahead of time: the first message has no time for it."""
    there = jax.sharding.SingleDeviceSharding(host)
    shapes = [[jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there) for x in jax.tree.leaves(a)] for a in arguments]
    return jax.jit(partial(function)).lower(*shapes).compile()
