"""Mean of a replica's message and those of its senders: pairs, groups and directed graphs, with any dense wire format.

    mean_i = x_i + Σ_j (Q(x_j) − Q(x_i)) / size_i        j over the senders of i in this draw

Q(x) is what a receiver decodes. Replicas move by differences of decoded messages: equal replicas stay equal, the
corrections of a group sum to zero, and each replica keeps what is below the format's resolution. Every member of a
group sends its whole message to every other, by `lax.ppermute`; a `lax.switch` over the pool of the pairing chooses
the receivers at run time.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from noloco_jax.exchange import modulo
from noloco_jax.exchange.axes import AxisName, ReplicaAxes, checked_axes, names_of, num_parts
from noloco_jax.exchange.blocks import windows_of
from noloco_jax.exchange.permute import permute
from noloco_jax.exchange.routes import Routes, lower
from noloco_jax.exchange.wire import Wire, from_code, to_code
from noloco_jax.outer.fragments import Fragments
from noloco_jax.outer.pairing import Pairing, senders_of
from noloco_jax.outer.rule import Outgoing

PyTree = Any
# Float32 arrays of at least this many bytes travel alone, without a copy.
ALONE = 2**27


@dataclass(frozen=True)
class MeanExchange:
    """The mean over a replica and its senders: an `outer.transform.Exchange`.

    Attributes:
      pairing: the groups or graphs of every draw; None for islands, whose exchange is elsewhere.
      wire: wire format of the messages; `Modulo` for pairs only.
      axis_name: axes of the replicas.
    """

    pairing: Pairing | None
    wire: Wire | modulo.Modulo
    axis_name: AxisName

    def mean(self, outgoing: Outgoing, number: Any, fragments: Fragments) -> tuple[PyTree, PyTree]:
        """Return the mean that this replica receives, and the windows to remember; see `outer.transform.Exchange`.

        Raises:
          ValueError: if there is no pairing, or the axes hold another number of replicas than it.
        """
        if self.pairing is None:
            raise ValueError(
                "noloco has no pairing, which only an Island does without: give RandomPairing(num_replicas)"
            )
        message = outgoing.message
        axes = checked_axes(message, self.axis_name, self.pairing.num_replicas)
        fragment, draw = fragments.of(number)
        index = self.pairing.pool_index(draw, fragment)
        senders, sizes = senders_of(self.pairing)
        largest = int(sizes.max())
        if largest == 1:
            return message, outgoing.windows
        routes = [lower(senders[:, k], axes.num_devices, axes.num_slots) for k in range(largest - 1)]
        # The size of this replica's group, a number where all are equal: XLA may then multiply by its reciprocal.
        size = largest if (sizes == largest).all() else jnp.asarray(sizes)[index, axes.replica()]

        if largest == 2 and self.wire.exact:
            others = send(message, routes[0], index, axes)
            return jax.tree.map(lambda x, other: (x + other) / 2, message, others), None
        dims = fragments.block_dims(message)
        if isinstance(self.wire, modulo.Modulo):
            return _pair_mean_in_windows(self.wire, outgoing, dims, number, routes[0], index, size, axes)
        blocks = to_code(self.wire, message, dims)
        # The sender must decode exactly what it sends: without the barrier a compiler may round twice, differently.
        code = blocks if self.wire.exact else lax.optimization_barrier(jax.tree.map(self.wire.encode, blocks))
        own, total = jax.tree.map(self.wire.decode, code), None
        for route in routes:  # of those that a smaller group lacks, a replica is its own sender
            others = jax.tree.map(self.wire.decode, send(code, route, index, axes))
            differences = jax.tree.map(jnp.subtract, others, own)
            total = differences if total is None else jax.tree.map(jnp.add, total, differences)
        change = from_code(self.wire, jax.tree.map(lambda x: x / size, total), message, dims)
        return jax.tree.map(jnp.add, message, change), None

    def windows(self, params: PyTree, fragments: Fragments) -> PyTree:
        """Return the first windows of a modulo format; None for others."""
        return windows_of(fragments, params) if isinstance(self.wire, modulo.Modulo) else None


@dataclass(frozen=True)
class AllExchange:
    """The mean over all replicas by an all-reduce: an `outer.transform.Exchange`. All receive the same bits."""

    axis_name: AxisName

    def mean(self, outgoing: Outgoing, number: Any, fragments: Fragments) -> tuple[PyTree, PyTree]:
        """See `outer.transform.Exchange`."""
        del number, fragments
        return all_mean(outgoing.message, self.axis_name), None

    def windows(self, params: PyTree, fragments: Fragments) -> None:
        """Return None: there are none."""


def all_mean(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Return the mean over all replicas by an all-reduce, as in DiLoCo's outer step and every step of DDP."""
    ReplicaAxes.bound(axis_name)
    for name in reversed(names_of(axis_name)):
        if lax.axis_size(name) > 1:  # XLA's partitioner refuses an all-reduce over one device beside auto axes
            tree = lax.pmean(tree, name)
    return tree


def send(tree: PyTree, routes: Routes, index: Any, axes: ReplicaAxes) -> PyTree:
    """Give every replica the tree of its sender in entry `index` of the routes, in one buffer a message.

    Arrays of one dtype are joined, float32 arrays of `ALONE` bytes or more excepted. Nothing is joined if nothing
    leaves the device, or if joining would move data inside a replica that the partitioner shards.
    """
    if axes.num_devices == 1 or num_parts() > 1:
        return permute(tree, routes, index, axes)
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        is_alone = x.dtype == jnp.float32 and x.size * x.dtype.itemsize >= ALONE
        groups.setdefault(i if is_alone else x.dtype, []).append(i)
    joined = [jnp.concatenate([jnp.ravel(leaves[i]) for i in group]) for group in groups.values()]
    for group, buffer in zip(groups.values(), permute(joined, routes, index, axes), strict=True):
        start = 0
        for i in group:
            size = math.prod(leaves[i].shape)
            leaves[i] = lax.slice_in_dim(buffer, start, start + size).reshape(leaves[i].shape)
            start += size
    return structure.unflatten(leaves)


def _pair_mean_in_windows(
    wire: modulo.Modulo,
    outgoing: Outgoing,
    dims: PyTree,
    number: Any,
    routes: Routes,
    index: Any,
    size: Any,
    axes: ReplicaAxes,
) -> tuple[PyTree, PyTree]:
    """Return the mean of pairs through the modulo wire format, and the new windows of its blocks."""
    message = outgoing.message
    # The barriers, as in `MeanExchange.mean`, make the sent and the locally used values one and the same rounding.
    proposed = lax.optimization_barrier(modulo.propose(wire, message, outgoing.movement, outgoing.windows, dims))
    windows = jax.tree.map(jnp.maximum, proposed, send(proposed, routes, index, axes))
    payload = lax.optimization_barrier(modulo.encode_in(wire, message, windows, number, dims))
    received = send(payload, routes, index, axes)
    halves, remembered = modulo.correct_in(wire, payload, received, windows, number, message, dims)
    if not isinstance(size, int):  # a replica that is alone learns nothing of others, and keeps its windows
        remembered = jax.tree.map(lambda new, old: jnp.where(size > 1, new, old), remembered, proposed)
    return jax.tree.map(jnp.add, message, halves), remembered
