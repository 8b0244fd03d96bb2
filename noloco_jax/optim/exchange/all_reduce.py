"""Mean of all replicas' messages, as in DiLoCo: an all-reduce in float32, or quantized parts that are gathered."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from noloco_jax.optim.exchange.axes import AxisName, ReplicaAxes, by_parts, names_of, num_parts, warn_if_sharded
from noloco_jax.optim.exchange.permute import bucketed
from noloco_jax.optim.exchange.swap import is_between_cpus, is_for_cpus, move
from noloco_jax.optim.exchange.wire import Wire, decode, encode
from noloco_jax.optim.fragments import Fragments
from noloco_jax.optim.outer_step import Exchange
from noloco_jax.optim.rule import Outgoing

PyTree = Any


@dataclass(frozen=True)
class AllExchange(Exchange):
    """The mean over all replicas. All receive the same bits.

    Quantized numbers cannot be summed in transit. So every device averages a part of the weights: it receives that part
    of every message, takes the mean in float32, quantizes it again and sends it to all. A replica sends 2(N−1)/N
    messages, as in a ring all-reduce, where a gather of whole messages would send N−1. What the two roundings take is
    lost: there is no error feedback, since DiLoCo's replicas stay equal and keep nothing of their own.

    Attributes:
      wire: wire format of the messages; no `Modulo`.
      axis_name: axes of the replicas.
    """

    wire: Wire
    axis_name: AxisName

    def mean(self, outgoing: Outgoing, number: Any, fragments: Fragments) -> tuple[PyTree, None]:
        """See `Exchange`."""
        message, axes = outgoing.message, ReplicaAxes.bound(self.axis_name)
        if self.wire.exact or axes.num_replicas == 1:
            return all_mean(message, self.axis_name), None
        warn_if_sharded(message, axes)
        dims = fragments.block_dims(message)
        leaves, structure = jax.tree.flatten(encode(self.wire, message, dims))
        buffers, cut = bucketed(leaves, axes, kept=int(self.wire.takes_blocks))
        code = structure.unflatten(cut([_mean_code(self.wire, buffer, axes) for buffer in buffers]))
        return decode(self.wire, code, message, dims), None


def all_mean(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Return the mean over all replicas by an all-reduce, as in DiLoCo's outer step and every step of DDP."""
    leaves, structure = jax.tree.flatten(tree)
    buffers, cut = leaves, list
    axes = ReplicaAxes.bound(axis_name)
    if is_for_cpus():  # gloo reduces arrays one after another, with 2(N−1) round trips each; NCCL takes all at once
        buffers, cut = bucketed(leaves, axes)
    for name in reversed(names_of(axis_name)):
        if lax.axis_size(name) > 1:  # XLA's partitioner refuses an all-reduce over one device beside auto axes
            buffers = lax.pmean(buffers, name)
    return structure.unflatten(cut(buffers))


def _mean_code(wire: Wire, code: jax.Array, axes: ReplicaAxes) -> jax.Array:
    """Return the payload of the mean of all replicas' arrays, given the own payload."""
    code_RB = code.reshape(-1, code.shape[-1] if wire.takes_blocks else 1)
    code_LRB = code_RB[None] if axes.slot is None else lax.all_gather(code_RB, axes.slot)
    num_rows = len(code_RB)
    code_LRB = jnp.pad(code_LRB, ((0, 0), (0, -num_rows % (axes.num_devices * num_parts())), (0, 0)))
    mean = by_parts(partial(_mean_of_parts, wire, axes), 1, 0)
    return mean(code_LRB)[:num_rows].reshape(code.shape)


def _mean_of_parts(wire: Wire, axes: ReplicaAxes, code_LRB: jax.Array) -> jax.Array:
    """Return the payload (R, B) of the mean; a device averages an equal part of the rows R of all replicas."""
    slots, rows, width = code_LRB.shape
    if axes.num_devices > 1:
        code_LDRB = code_LRB.reshape(slots, axes.num_devices, rows // axes.num_devices, width)
        if is_between_cpus():
            code_DLRB = _all_to_all_by_shifts(jnp.moveaxis(code_LDRB, 1, 0), axes)
        else:
            code_DLRB = lax.all_to_all(code_LDRB, axes.device, split_axis=1, concat_axis=0)
        code_LRB = code_DLRB.reshape(axes.num_replicas, rows // axes.num_devices, width)

    def plus(replica: Any, total: jax.Array) -> jax.Array:
        return total + wire.decode(code_LRB[replica])

    # One after another, in the order of the replicas, so that all layouts round alike.
    total = lax.fori_loop(1, axes.num_replicas, plus, wire.decode(code_LRB[0]))
    mean = wire.encode(total / axes.num_replicas)
    return lax.all_gather(mean, axes.device, tiled=True) if axes.num_devices > 1 else mean


def _all_to_all_by_shifts(parts_D: jax.Array, axes: ReplicaAxes) -> jax.Array:
    """Send part d to device d, and return the parts that come from devices 0, 1, ...

    A shift around the devices sends and receives at once, where gloo's all-to-all takes twice the link's time.
    """
    here, number = lax.axis_index(axes.device), axes.num_devices
    received_D = parts_D  # of its own the device keeps the part in its place
    for places in range(1, number):
        sent = lax.dynamic_index_in_dim(parts_D, (here + places) % number, keepdims=False)
        arrived = move(sent, [(device + places) % number for device in range(number)], axes.device)
        received_D = lax.dynamic_update_index_in_dim(received_D, arrived, (here - places) % number, 0)
    return received_D
