"""Mean of a replica's message and those of its senders: pairs, groups and directed graphs, with any dense wire format.

    mean_i = x_i + Σ_j (Q(x_j) − Q(x_i)) / size_i        j over the senders of i in this draw

Q(x) is what a receiver decodes. Replicas move by differences of decoded messages: equal replicas stay equal, the
corrections of a group sum to zero, and each replica keeps what is below the format's resolution. Groups of 4, 8, 16,
... average by halves (`halves`). In other groups and graphs a replica sends its whole message to each receiver, by
`swap.move`. A `lax.switch` over the pool of the pairing chooses the receivers at run time.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from noloco_jax.optim.exchange import modulo
from noloco_jax.optim.exchange.axes import AxisName, checked_axes
from noloco_jax.optim.exchange.blocks import windows_of
from noloco_jax.optim.exchange.halves import Leg, mean_by_halves
from noloco_jax.optim.exchange.permute import bucketed, device_routes, permute
from noloco_jax.optim.exchange.wire import Wire, from_code, to_code
from noloco_jax.optim.fragments import Fragments
from noloco_jax.optim.outer_step import Exchange
from noloco_jax.optim.pairing import Pairing, halvings_of, senders_of
from noloco_jax.optim.rule import Outgoing

PyTree = Any


@dataclass(frozen=True)
class MeanExchange(Exchange):
    """The mean over a replica and its senders.

    Attributes:
      pairing: the groups or graphs of every draw; None for islands, whose exchange is elsewhere.
      wire: wire format of the messages; `Modulo` for pairs and groups of 4, 8, 16, ... only.
      axis_name: axes of the replicas.
    """

    pairing: Pairing | None
    wire: Wire | modulo.Modulo
    axis_name: AxisName

    def mean(self, outgoing: Outgoing, number: Any, fragments: Fragments) -> tuple[PyTree, PyTree]:
        """Return the mean that this replica receives, and the windows to remember; see `Exchange`.

        Raises:
          ValueError: if there is no pairing, or the axes hold another number of replicas than it.
        """
        if self.pairing is None:
            raise ValueError(
                "noloco has no pairing, which only an Island does without: give RandomPairing(num_replicas)"
            )
        message, movement, windows = outgoing
        axes = checked_axes(message, self.axis_name, self.pairing.num_replicas)
        fragment, draw = fragments.of(number)
        index = self.pairing.pool_index(draw, fragment)
        senders, sizes = senders_of(self.pairing)
        largest = int(sizes.max())
        if largest == 1:
            return message, windows
        route = partial(device_routes, num_devices=axes.num_devices, num_slots=axes.num_slots)
        dims = fragments.block_dims(message)
        if halvings := halvings_of(self.pairing):
            legs = [
                Leg(
                    partial(permute, routes=route(partners), index=index, axes=axes),
                    jnp.asarray(sides)[index, axes.replica()],
                )
                for partners, sides in halvings
            ]
            return mean_by_halves(self.wire, outgoing, legs, number, dims)
        routes = [route(senders[:, k]) for k in range(largest - 1)]
        # The size of this replica's group, a number where all are equal: XLA may then multiply by its reciprocal.
        size = largest if (sizes == largest).all() else jnp.asarray(sizes)[index, axes.replica()]
        if largest == 2 and self.wire.exact:
            others = permute(message, routes[0], index, axes)
            return jax.tree.map(lambda x, other: (x + other) / 2, message, others), None

        # The barriers make the sent and the locally used values one and the same rounding: a compiler may round twice.
        if isinstance(self.wire, modulo.Modulo):
            proposed = lax.optimization_barrier(modulo.propose(self.wire, message, movement, windows, dims))
            windows = jax.tree.map(jnp.maximum, proposed, permute(proposed, routes[0], index, axes))
            code = lax.optimization_barrier(modulo.encode_in(self.wire, message, windows, number, dims))
            received = permute(code, routes[0], index, axes)
            halves, remembered = modulo.correct_in(self.wire, code, received, windows, number, message, dims)
            if not isinstance(size, int):  # a replica that is alone learns nothing of others, and keeps its windows
                remembered = jax.tree.map(lambda new, old: jnp.where(size > 1, new, old), remembered, proposed)
            return jax.tree.map(jnp.add, message, halves), remembered

        leaves, structure = jax.tree.flatten(to_code(self.wire, message, dims))
        blocks, cut = bucketed(leaves, axes, kept=1) if self.wire.takes_blocks else (leaves, list)
        code = blocks if self.wire.exact else lax.optimization_barrier([*map(self.wire.encode, blocks)])
        own, total = [*map(self.wire.decode, code)], None
        for route in routes:  # of those that a smaller group lacks, a replica is its own sender
            others = map(self.wire.decode, permute(code, route, index, axes))
            differences = [*map(jnp.subtract, others, own)]
            total = differences if total is None else [*map(jnp.add, total, differences)]
        assert total is not None
        change = from_code(self.wire, structure.unflatten(cut([x / size for x in total])), message, dims)
        return jax.tree.map(jnp.add, message, change), None

    def windows(self, params: PyTree, fragments: Fragments) -> PyTree:
        """Return the first windows of a modulo format; None for others."""
        return windows_of(fragments, params) if isinstance(self.wire, modulo.Modulo) else None
