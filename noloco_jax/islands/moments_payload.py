"""Payload of messages that carry the inner optimizer's moments behind the weights (`outer.moments`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noloco_jax.islands.frames import ArraySpec
from noloco_jax.islands.payload import Arrays, Codec, Read, compiled, decoded, host_of, specs_of
from noloco_jax.islands.protocol.bounds import Factors
from noloco_jax.islands.protocol.messages import Message
from noloco_jax.spmd.solo import SoloMoments

PyTree = Any


class MomentsCodec:
    """Codec of messages of weights, in some rounds with moments behind them: a `payload.Codec`.

    A moment's correction is at most as large as the own moment, array by array. Honest moments of a pair differ by
    about their own size, so that no history is needed to bound them; what a damaged or hostile one changes decays with
    the moment.

    Args:
      weights: the codec of the weights.
      kept: number of arrays kept of the weights' message.
      moments: the programs of the moments.
      is_shared: outer step -> True if its message carries moments.

    Raises `UserError` as `payload.codec_of`.
    """

    def __init__(self, weights: Codec, kept: int, moments: SoloMoments, is_shared: Callable[[int], bool]):
        self._weights, self._kept, self._is_shared = weights, kept, is_shared
        self._code = specs_of(moments.code)
        self._change = moments.change
        self._sent = jax.tree.structure(moments.sent)
        self._wire = moments.wire
        self._like = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in jax.tree.leaves(moments.sent)]
        self._cuts = jax.tree.leaves(moments.cuts)
        self._host = host_of(moments.wire.name)
        weight = jax.ShapeDtypeStruct((), np.float32)
        self._are_finite = compiled(self._finite, self._host, moments.code)
        self._corrected = compiled(self._correction, self._host, moments.sent, moments.code, moments.code, [weight])

    def specs(self, round: int) -> Mapping[str, Sequence[ArraySpec]]:
        specs = dict(self._weights.specs(round))
        if self._is_shared(round):
            specs[Message.__name__] = [*specs[Message.__name__], *self._code]
        return specs

    def windows(self, own: Arrays) -> Arrays | None:
        return self._weights.windows(own[: self._kept])

    def payload(self, own: Arrays, windows: Arrays) -> Arrays:
        moments = own[self._kept :][: len(self._code)]
        return [*self._weights.payload(own[: self._kept], windows), *moments]

    def read(self, own: Arrays, windows: Arrays, others: Arrays) -> Read:
        """Decode a peer's weights; the norm is not finite either where a value of the moments is not."""
        if len(own) == self._kept:
            return self._weights.read(own, windows, others)
        moments = others[-len(self._code) :]
        read = self._weights.read(own[: self._kept], windows, others[: -len(self._code)])
        norm = read.norm if self._are_finite(self._there(moments)) else float("nan")
        return Read([*read.arrays, *moments], norm, read.differences)

    def correction(self, own: Arrays, read: Arrays, weight: float, factors: Factors = ()) -> Arrays:
        """Return the weights' correction, and behind it the moments', which `factors` do not scale."""
        if len(own) == self._kept:
            return self._weights.correction(own, read, weight, factors)
        count = len(self._code)
        weights = self._weights.correction(own[: self._kept], read[:-count], weight, factors)
        code, sent = own[self._kept :][:count], own[self._kept + count :]
        arguments = map(self._there, (sent or code, code, read[-count:], [np.asarray(weight, np.float32)]))
        return [*weights, *map(np.asarray, self._corrected(*arguments))]

    def _there(self, arrays: Arrays) -> Any:
        return jax.device_put(list(arrays), self._host)

    def _values(self, code: list[jax.Array]) -> list[jax.Array]:
        return code if self._wire.exact else decoded(self._wire, self._like, self._cuts, code)

    def _finite(self, code: list[jax.Array]) -> jax.Array:
        return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in self._values(code)]))

    def _correction(self, sent: list, own: list, others: list, weight: list[jax.Array]) -> list[jax.Array]:
        def mean(sent: jax.Array, own: jax.Array, others: jax.Array) -> jax.Array:
            moved = weight[0] * (others - own)
            largest, size = jnp.linalg.norm(sent.reshape(-1)), jnp.linalg.norm(moved.reshape(-1))
            return sent + jnp.where(size > largest, largest / size, 1.0) * moved

        means = [mean(*one) for one in zip(sent, self._values(own), self._values(others), strict=True)]
        of_one = jax.vmap(lambda sent, mean: self._change(*(self._sent.unflatten(x) for x in (sent, mean))))
        return jax.tree.leaves(of_one(sent, means))
