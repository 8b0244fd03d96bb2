"""Payload of messages between islands: array specs, encoding, decoding and corrections.

Messages are encoded by the program that makes them, and decoded here, on the host's own processor and in whichever
thread asks: neither the accelerator nor the training is held up. A code in windows is encoded here too, once the other
island's windows are there.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from noloco_jax.errors import UserError
from noloco_jax.exchange.modulo import BROKEN, Modulo, correct_in, encode_in
from noloco_jax.exchange.wire import Wire, from_code
from noloco_jax.islands.frames import ArraySpec
from noloco_jax.islands.protocol.bounds import Factors
from noloco_jax.islands.protocol.messages import Message, Windows

PyTree = Any
_WIDEST = 32  # more than the partner's, in quarters of a power of two
Arrays = Sequence[np.ndarray]


def specs_of(tree: PyTree) -> list[ArraySpec]:
    """Return the specs of arrays like the leaves of a tree."""
    return [ArraySpec(tuple(x.shape), np.dtype(x.dtype)) for x in jax.tree.leaves(tree)]


def norm_of(arrays: Arrays) -> float:
    """Return the Euclidean norm over all arrays; not finite where a value is not."""
    squares = (float(np.linalg.norm(x.reshape(-1).astype(np.float32, copy=False))) ** 2 for x in arrays)
    return float(np.sqrt(sum(squares)))


class Read(NamedTuple):
    """Decoded message of a peer.

    Attributes:
      arrays: argument of `Codec.correction`.
      norm: Euclidean, of what the message stands for; not finite where a value is not.
      differences: |m_j − m_i| of each array.
    """

    arrays: Arrays
    norm: float
    differences: tuple[float, ...]


class Codec(Protocol):
    """Codec of messages.

    A message is given as the step program has made it: `spmd.solo.SoloPrograms.step`.
    """

    def specs(self, round: int) -> Mapping[str, Sequence[ArraySpec]]:
        """Return what each array behind a header must be in an exchange of that round, by the header's kind."""
        ...

    def windows(self, own: Arrays) -> Arrays | None:
        """Return the windows to send ahead of a message, or None."""
        ...

    def payload(self, own: Arrays, windows: Arrays) -> Arrays:
        """Return the payload to send; `windows` of the pair, empty where none are sent ahead."""
        ...

    def read(self, own: Arrays, windows: Arrays, others: Arrays) -> Read:
        """Decode a peer's payload."""
        ...

    def correction(self, own: Arrays, read: Arrays, weight: float, factors: Factors = ()) -> Arrays:
        """Return c = factor · weight · (Q(m_j) − Q(m_i)) of each array, and then the state of a codec with windows."""
        ...


def codec_of(wire: Wire | Modulo, message: PyTree, code: PyTree, cuts: PyTree) -> Codec:
    """Return the codec of a wire; see `SoloPrograms` for its parts.

    Args:
      wire: the code.
      message: shapes and dtypes of a message; the first axis counts replicas, of which each is encoded by itself.
      code: the same of what travels.
      cuts: the dimension of every array of one replica along which the code's blocks lie.

    Raises `UserError` where JAX has been told to use an accelerator alone, and the code has to be decoded.
    """
    if isinstance(wire, Modulo):
        return WindowCodec(wire, message, code, cuts)
    return PlainCodec(wire, message, code, cuts)


class PlainCodec:
    """Codec of wires without windows: Q(m) is the decoded value of a message. See `codec_of`."""

    def __init__(self, wire: Wire, message: PyTree, code: PyTree, cuts: PyTree = None):
        self._specs = {Message.__name__: specs_of(code)}
        self._is_exact = wire.exact
        if wire.exact:
            return
        self._host = host_of(wire.name)
        decode = partial(decoded, wire, _of_one(message), cuts and jax.tree.leaves(cuts))
        self._decode = compiled(decode, self._host, code)
        self._sizes = compiled(partial(_sizes, decode), self._host, code, code)

    def specs(self, round: int) -> Mapping[str, Sequence[ArraySpec]]:
        return self._specs

    def windows(self, own: Arrays) -> None:
        del own

    def payload(self, own: Arrays, windows: Arrays) -> Arrays:
        del windows
        return own

    def read(self, own: Arrays, windows: Arrays, others: Arrays) -> Read:
        del windows
        if self._is_exact:
            pairs = zip(own, others, strict=True)
            return Read(others, norm_of(others), tuple(norm_of([_float32(x) - _float32(y)]) for x, y in pairs))
        norm, differences = self._sizes(*jax.device_put((list(own), list(others)), self._host))
        return Read(others, float(norm), tuple(differences.tolist()))

    def values(self, arrays: Arrays) -> Arrays:
        """Decode Q(m) of a payload."""
        if self._is_exact:
            return arrays
        return [np.asarray(x) for x in self._decode(jax.device_put(list(arrays), self._host))]

    def correction(self, own: Arrays, read: Arrays, weight: float, factors: Factors = ()) -> Arrays:
        """Subtract the decoded messages, the same numbers on both islands.

        With equal weights their corrections are exactly opposite, and equal messages give zero.
        """
        values = self.values(own), self.values(read)
        weights = _weights(weight, factors, len(values[0]))
        return [share * (theirs - mine) for share, mine, theirs in zip(weights, *values, strict=True)]


class WindowCodec:
    """Codec of modulo wires, whose messages follow the windows that each of a pair proposes. See `codec_of`.

    Of another island's message only the difference to the own one can be known. What it stands for is the own message
    and that difference: its norm is held against those of earlier messages, as with every wire, so that wide windows
    bring no weights from far away; blocks that are refused count as equal.
    """

    def __init__(self, wire: Modulo, message: PyTree, code: PyTree, cuts: PyTree):
        proposed, payload = code
        self._specs = {Windows.__name__: specs_of(proposed), Message.__name__: specs_of(payload)}
        self._count = len(self._specs[Windows.__name__])
        self._host = host_of(wire.name)
        like, of_leaves = _of_one(message), jax.tree.leaves(cuts)
        self._encode = compiled(partial(_encoded, wire, of_leaves), self._host, message, proposed)
        self._read = compiled(partial(_read, wire, like, of_leaves), self._host, message, proposed, payload)

    def specs(self, round: int) -> Mapping[str, Sequence[ArraySpec]]:
        return self._specs

    def windows(self, own: Arrays) -> Arrays:
        return own[: self._count]

    def payload(self, own: Arrays, windows: Arrays) -> Arrays:
        code = self._encode(*jax.device_put((list(own[self._count :]), list(windows)), self._host))
        return [np.asarray(x) for x in code]

    def read(self, own: Arrays, windows: Arrays, others: Arrays) -> Read:
        arguments = list(own[self._count :]), list(windows), list(others)
        corrections, remembered, norm, differences = self._read(*jax.device_put(arguments, self._host))
        return Read([np.asarray(x) for x in (*corrections, *remembered)], float(norm), tuple(differences.tolist()))

    def correction(self, own: Arrays, read: Arrays, weight: float, factors: Factors = ()) -> Arrays:
        """Scale half the difference, so that with equal weights corrections are exactly opposite."""
        halves, remembered = read[: self._count], read[self._count :]
        weights = _weights(2 * weight, factors, self._count)
        return [*(share * half for share, half in zip(weights, halves, strict=True)), *remembered]


def pair_windows(own: Arrays, others: Arrays) -> Arrays:
    """Return the windows of a pair: the larger of the two proposed for every block, within a limit.

    No window of an array is more than 256 times as wide as the widest that the more modest of the two islands proposes
    for any of its blocks, as rows of which one island has seen no token may have moved in the other alone.
    """

    def of_array(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        larger = np.maximum(mine, theirs)
        widest = min(np.max(x, where=x != BROKEN, initial=0) for x in (mine, theirs))
        capped = np.minimum(larger, min(int(widest) + _WIDEST, BROKEN - 1)).astype(np.uint8)
        return np.where(larger == BROKEN, larger, capped)

    return [of_array(mine, theirs) for mine, theirs in zip(own, others, strict=True)]


def _weights(weight: float, factors: Factors, count: int) -> list[np.float32]:
    """Return the weight of each array's difference, the same number on both islands for equal weights."""
    return [np.float32(weight * factor) for factor in factors or (1.0,) * count]


def _float32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32, copy=False)


def _sizes(decode: Callable[..., Any], own: Any, others: Any) -> tuple[jax.Array, jax.Array]:
    """Return the norm of a decoded message, and that of each array's difference to the own one."""
    mine, theirs = decode(own), decode(others)
    differences = [jnp.linalg.norm((y - x).reshape(-1)) for x, y in zip(mine, theirs, strict=True)]
    return optax.tree.norm(theirs), jnp.stack(differences)


def host_of(wire: str) -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        raise UserError(
            f"JAX has no CPU, on which messages of outer.wire={wire} are decoded: add cpu to JAX_PLATFORMS, as in "
            "cuda,cpu"
        ) from None


def compiled(function: Callable[..., Any], host: Any, *arguments: PyTree) -> Callable[..., Any]:
    """Compile `function` for arrays like these ahead of time: the first message has no time for it."""
    there = jax.sharding.SingleDeviceSharding(host)
    shapes = [[jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there) for x in jax.tree.leaves(a)] for a in arguments]
    return jax.jit(function).lower(*shapes).compile()


def _of_one(message: PyTree) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of one replica's arrays."""
    return [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in jax.tree.leaves(message)]


def decoded(
    wire: Wire, likes: Sequence[Any], cuts: Sequence[int] | None, codes: Sequence[jax.Array]
) -> list[jax.Array]:
    def of_one(codes: Sequence[jax.Array]) -> list[jax.Array]:
        return from_code(wire, list(map(wire.decode, codes)), list(likes), cuts and list(cuts))

    return jax.vmap(of_one)(list(codes))


def _encoded(wire: Modulo, cuts: list[int], message: list[jax.Array], of_pair: list[jax.Array]) -> list[jax.Array]:
    return jax.vmap(lambda message, of_pair: encode_in(wire, message, of_pair, 0, cuts))(message, of_pair)


def _read(
    wire: Modulo,
    like: list[jax.ShapeDtypeStruct],
    cuts: list[int],
    message: list[jax.Array],
    of_pair: list[jax.Array],
    others: list[jax.Array],
) -> tuple[list[jax.Array], list[jax.Array], jax.Array, jax.Array]:
    def of_one(message: list[jax.Array], of_pair: list[jax.Array], others: list[jax.Array]) -> Any:
        own = encode_in(wire, message, of_pair, 0, cuts)
        return correct_in(wire, own, others, of_pair, 0, like, cuts)

    corrections, remembered = jax.vmap(of_one)(message, of_pair, others)
    norm = optax.tree.norm([m + 2 * half for m, half in zip(message, corrections, strict=True)])
    differences = jnp.stack([2 * jnp.linalg.norm(half.reshape(-1)) for half in corrections])
    return corrections, remembered, norm, differences
