"""Mean of groups of g = 2^j replicas by halves: a member sends 2 (g − 1) / g messages, in 2j − 1 swaps of pairs.

In the first swap a replica sends the half of its message that its partner keeps, and receives the partner's numbers of
the half that it keeps itself. It then averages that half with the replicas that keep the same one, by further swaps,
and at last returns the result to the partner. With Q as in `mean`:

    c = (Q(x_partner) − Q(x)) / 2       on the half that is kept
    e = the change of x + c by the further swaps
    own change: e + c;  returned to the partner: e − c

In the innermost pair both send their whole part and return nothing. An all-reduce by recursive halving and doubling
sends as much (Thakur, Rabenseifner and Gropp, 2005). As only differences travel back, equal replicas stay equal. What
the returned difference loses by rounding is subtracted from the own change: the corrections of a group sum to zero.

A modulo format's windows may narrow at every halving, where those of a pair narrow once an exchange. Keeping the widest
of an exchange was coarser and no better (MEASURED).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from noloco_jax.optim.exchange.blocks import smallest_and_largest, tree_from_blocks, tree_in_blocks
from noloco_jax.optim.exchange.modulo import Modulo, by_array, by_block
from noloco_jax.optim.exchange.wire import WIRES, Wire, from_code, to_code
from noloco_jax.optim.fragments import Fragments, smallest_dimension
from noloco_jax.optim.rule import Outgoing

PyTree = Any
Arrays = list[jax.Array]
# Blocks (..., blocks, B) stay whole: their last dimension is not cut.
_OF_BLOCKS = Fragments(2, lambda path, shape: smallest_dimension(shape[:-1], 2))
_OF_ARRAYS = Fragments(2)


class Leg(NamedTuple):
    """Swap with a partner.

    Attributes:
      swap: arrays of this replica -> those of the partner.
      side: half that this replica keeps, 0 or 1, an int32 scalar; the partner keeps the other.
    """

    swap: Callable[[Any], Any]
    side: Any


class Memory(NamedTuple):
    """State of a modulo format, a value a block (..., blocks, 1): its movement, before a swap, and its window."""

    moved: Arrays
    windows: Arrays


def mean_by_halves(
    wire: Wire | Modulo, outgoing: Outgoing, legs: Sequence[Leg], number: Any, dims: PyTree
) -> tuple[PyTree, PyTree]:
    """Return the mean of the group's messages as this replica receives it, and the windows to remember, or None.

    Args:
      wire: wire format.
      outgoing: data of this replica.
      legs: swaps, one for each halving of the group; the partners of all of them are the group.
      number: outer step.
      dims: the dimension of every array along which blocks lie.
    """
    leaves, structure = jax.tree.flatten(outgoing.message)
    along = structure.flatten_up_to(dims)
    if not isinstance(wire, Modulo):
        change, _ = _group_change(wire, to_code(wire, leaves, along), None, legs, number)
        change, windows = from_code(wire, change, leaves, along), None
    else:
        movement, windows = map(structure.flatten_up_to, outgoing[1:])
        moved = [smallest_and_largest(x)[1] for x in tree_in_blocks(movement, along)]
        blocks, memory = tree_in_blocks(leaves, along), Memory(moved, by_block(windows, along))
        change, memory = _group_change(wire, blocks, memory, legs, number)
        assert memory is not None
        change, windows = tree_from_blocks(change, leaves, along), by_array(memory.windows, along)
        windows = structure.unflatten(windows)
    return structure.unflatten([*map(jnp.add, leaves, change)]), windows


def _group_change(
    wire: Wire | Modulo, values: Arrays, memory: Memory | None, legs: Sequence[Leg], number: Any
) -> tuple[Arrays, Memory | None]:
    """Return the change of values, in blocks if the format takes them, to the group's mean, and the new memory."""
    leg, *inner = legs
    if not inner:
        return _pair_change(wire, values, memory, leg, number, None)
    takes_blocks = isinstance(wire, Modulo) or wire.takes_blocks
    halves = _OF_BLOCKS if takes_blocks else _OF_ARRAYS
    given = values
    if takes_blocks:
        values = [*map(_even, values)]
        memory = None if memory is None else Memory(*([*map(_even, part)] for part in memory))
    change, memory = _pair_change(wire, values, memory, leg, number, halves)
    kept = [x + c for x, c in zip(halves.take(values, leg.side), change, strict=True)]
    further, memory = _group_change(wire, kept, memory, inner, number)

    back = WIRES["int4"] if isinstance(wire, Modulo) else wire  # a difference is small, however large the weights are
    assert isinstance(back, Wire)
    code = lax.optimization_barrier([back.encode(e - c) for e, c in zip(further, change, strict=True)])
    own = [2 * e - back.decode(x) for e, x in zip(further, code, strict=True)]
    arrived, windows = leg.swap((code, None if memory is None else memory.windows))
    whole = _joined(halves, values, own, [*map(back.decode, arrived)], leg.side)
    if memory is not None:
        like = [jnp.zeros((*x.shape[:-1], 1), jnp.uint8) for x in values]
        joined = _cut(_joined(halves, like, memory.windows, windows, leg.side), given)
        memory = Memory([], joined)
    return (_cut(whole, given) if takes_blocks else whole), memory


def _pair_change(
    wire: Wire | Modulo, values: Arrays, memory: Memory | None, leg: Leg, number: Any, halves: Fragments | None
) -> tuple[Arrays, Memory | None]:
    """Return c on the kept half, and the memory of it; without `halves` on the whole."""

    def half(arrays: Arrays, side: Any) -> Arrays:
        return arrays if halves is None else halves.take(arrays, side)

    if not isinstance(wire, Modulo):
        code = lax.optimization_barrier([*map(wire.encode, values)])
        theirs = leg.swap(half(code, 1 - leg.side))
        return [(wire.decode(y) - wire.decode(x)) / 2 for x, y in zip(half(code, leg.side), theirs, strict=True)], None
    assert memory is not None
    proposed = lax.optimization_barrier([*map(wire.windows, values, *memory)])
    windows = [*map(jnp.maximum, proposed, leg.swap(proposed))]
    code = lax.optimization_barrier([wire.encode(x, w, number) for x, w in zip(values, windows, strict=True)])
    theirs = leg.swap(half(code, 1 - leg.side))
    mine = zip(half(code, leg.side), theirs, half(windows, leg.side), strict=True)
    changes, remembered = zip(*(wire.correction(x, y, w, number) for x, y, w in mine), strict=True)
    return [*changes], Memory(half(memory.moved, leg.side), [*remembered])


def _joined(halves: Fragments, like: Arrays, kept: Arrays, given: Arrays, side: Any) -> Arrays:
    return halves.put(halves.put(like, kept, side), given, 1 - side)


def _even(blocks: jax.Array) -> jax.Array:
    """Append zeros along the longest dimension but the last if all but the last are odd."""
    *sizes, _ = blocks.shape
    if any(size % 2 == 0 for size in sizes):
        return blocks
    longest = sizes.index(max(sizes))
    return jnp.pad(blocks, [(0, int(dim == longest)) for dim in range(blocks.ndim)])


def _cut(arrays: Arrays, like: Arrays) -> Arrays:
    """Invert `_even`: return arrays of the shapes of `like` in all dimensions but the last."""
    return [x[tuple(map(slice, y.shape[:-1]))] for x, y in zip(arrays, like, strict=True)]
