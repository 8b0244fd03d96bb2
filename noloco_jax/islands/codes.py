"""The form in which messages travel between islands: what must come, what it stands for, what two of them correct.

Messages are encoded by the program that makes them, and decoded here, on the host's own processor and in whichever
thread asks: neither the accelerator nor the training is held up.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from noloco_jax.errors import UserError
from noloco_jax.exchange.wire import Wire, from_code
from noloco_jax.islands.frames import ArraySpec

PyTree = Any
Arrays = Sequence[np.ndarray]


def specs_of(tree: PyTree) -> list[ArraySpec]:
    """What arrays like the leaves of a tree must be."""
    return [ArraySpec(tuple(x.shape), np.dtype(x.dtype)) for x in jax.tree.leaves(tree)]


def norm_of(arrays: Arrays) -> float:
    """Euclidean, over all arrays; not finite where a value is not."""
    squares = (float(np.linalg.norm(x.reshape(-1).astype(np.float32, copy=False))) ** 2 for x in arrays)
    return float(np.sqrt(sum(squares)))


class Codes:
    """Messages on their way: Q(m), what arrays stand for that `wire` has encoded.

    Args:
      wire: the code.
      message: shapes and dtypes of a message; the first axis counts replicas, of which each is encoded by itself.
      code: the same of what the wire makes of it.
      cuts: the dimension of every array of one replica along which the code's blocks lie; None: the last.

    Attributes:
      specs: what each array of a message must be when it comes.

    Raises `UserError` where JAX has been told to use an accelerator alone, and the code has to be decoded.
    """

    def __init__(self, wire: Wire, message: PyTree, code: PyTree, cuts: PyTree = None):
        self.specs = specs_of(code)
        self._is_exact = wire.exact
        if wire.exact:
            return
        try:
            self._host = jax.local_devices(backend="cpu")[0]
        except RuntimeError:
            raise UserError(
                f"JAX has no CPU, on which messages of outer.wire={wire.name} are decoded: add cpu to JAX_PLATFORMS, "
                "as in cuda,cpu"
            ) from None
        # Compiled here, as the first message has no time for it.
        there = jax.sharding.SingleDeviceSharding(self._host)
        sent = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there) for x in jax.tree.leaves(code)]
        likes = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in jax.tree.leaves(message)]  # of one replica
        of_leaves = None if cuts is None else jax.tree.leaves(cuts)
        self._decode = jax.jit(partial(_decoded, wire, likes, of_leaves)).lower(sent).compile()

    def values(self, arrays: Arrays) -> Arrays:
        """Q(m) of a message as it travels."""
        if self._is_exact:
            return arrays
        return [np.asarray(x) for x in self._decode(jax.device_put(list(arrays), self._host))]

    def norm(self, arrays: Arrays) -> float:
        """Euclidean, of all of Q(m); not finite where a value is not."""
        return norm_of(self.values(arrays))

    def correction(self, own: Arrays, others: Arrays, weight: float) -> Arrays:
        """c = weight · (Q(m_j) − Q(m_i)), from the messages of islands i and j as they travelled.

        Both islands subtract the same numbers, so that with equal weights their corrections are exactly opposite, and
        zero for equal messages.
        """
        pairs = zip(self.values(own), self.values(others), strict=True)
        return [np.float32(weight) * (theirs - mine) for mine, theirs in pairs]


def _decoded(
    wire: Wire, likes: Sequence[Any], cuts: Sequence[int] | None, codes: Sequence[jax.Array]
) -> list[jax.Array]:
    def of_one(codes: Sequence[jax.Array]) -> list[jax.Array]:
        return from_code(wire, list(map(wire.decode, codes)), list(likes), cuts and list(cuts))

    return jax.vmap(of_one)(list(codes))
