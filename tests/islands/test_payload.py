"""Messages as bytes: payloads of every wire format, corrections of a pair, and weights in 8 bits."""

import time
from functools import cache

import jax
import numpy as np
import pytest

from noloco_jax.islands.exchange import ProtocolError
from noloco_jax.islands.interfaces import Codec
from noloco_jax.islands.payload import (
    CATCH_UP,
    EXACT,
    MAX_WINDOW,
    ArraySpec,
    Message,
    StateCodec,
    codec_of,
    pack,
    pair_windows,
)
from noloco_jax.islands.transport import MAX_BYTES
from noloco_jax.optim.exchange.blocks import block_counts
from noloco_jax.optim.exchange.modulo import BROKEN, Modulo, encode_in, propose
from noloco_jax.optim.exchange.wire import encode, wire_of

SHAPES, DIMS = [(5, 96), (7,)], [1, 0]
WIRES = ("float32", "bfloat16", "int8", "int4", "modulo4")
STEP = {"float32": 0.0, "bfloat16": 2**-7, "int8": 2 / 255, "int4": 2 / 15}  # of the largest value of a block


def values(seed: int, distance: float = 1.0) -> list[np.ndarray]:
    shared = [np.random.default_rng(0).normal(size=shape) for shape in SHAPES]
    own = [distance * np.random.default_rng(seed + 1).normal(size=shape) for shape in SHAPES]
    return [(x + y).astype(np.float32) for x, y in zip(shared, own, strict=True)]


@cache
def codec(name: str) -> Codec:
    wire, like = wire_of(name), values(0)
    if isinstance(wire, Modulo):
        windows = [np.zeros(block_counts(shape, dim), np.uint8) for shape, dim in zip(SHAPES, DIMS, strict=True)]
        codes = jax.eval_shape(lambda m, w: encode_in(wire, m, w, 0, DIMS), like, windows)
        return codec_of(wire, like, (windows, codes), DIMS)
    return codec_of(wire, like, jax.eval_shape(lambda m: encode(wire, m, DIMS), like), DIMS)


def message(name: str, arrays: list[np.ndarray]) -> Message:
    """Return a message as an island's program makes it, in outer step 3."""
    wire = wire_of(name)
    if isinstance(wire, Modulo):
        movement = [np.full(shape, 0.05, np.float32) for shape in SHAPES]
        seen = [np.zeros(block_counts(shape, dim), np.uint8) for shape, dim in zip(SHAPES, DIMS, strict=True)]
        sent = propose(wire, arrays, movement, seen, DIMS), arrays
    else:
        sent = encode(wire, arrays, DIMS)
    return Message(3, [np.asarray(x) for x in jax.tree.leaves(sent)])


def exchanged(name: str, one: Message, other: Message) -> list[bytes]:
    """Return the parts that the first island receives."""
    made, parts = codec(name), list[list[bytes]]([[], []])
    for number, size in enumerate(made.sizes):
        both = [made.part(mine, number, parts[i]) for i, mine in enumerate((one, other))]
        for i in range(2):
            parts[i].append(both[1 - i])
            assert len(both[i]) == size
    return parts[0]


@pytest.mark.parametrize("weight", [0.5, 0.8])
@pytest.mark.parametrize("name", WIRES)
def test_a_correction_is_the_weighted_difference_up_to_the_format_s_rounding(name, weight):
    distance = 0.01 if name == "modulo4" else 1.0
    arrays = values(0, distance), values(1, distance)
    own, other = (message(name, one) for one in arrays)
    read = codec(name).read(own, exchanged(name, own, other))
    found = codec(name).correction(own, read, weight)
    assert read.norm == pytest.approx(np.sqrt(sum((x.astype(float) ** 2).sum() for x in arrays[1])), rel=0.05)
    whole = np.sqrt(sum(((y - x).astype(float) ** 2).sum() for x, y in zip(*arrays, strict=True)))
    assert read.difference == pytest.approx(whole, rel=0.25)
    for x, mine, theirs in zip(found, *arrays, strict=False):
        largest = max(np.abs(mine).max(), np.abs(theirs).max())
        step = 0.03 if name == "modulo4" else STEP[name] * largest
        np.testing.assert_allclose(x, weight * (theirs - mine), atol=weight * step + 1e-6)


@pytest.mark.parametrize("name", WIRES)
def test_corrections_of_a_pair_are_exactly_opposite_and_zero_between_equal_islands(name):
    own, other = (message(name, values(i, 0.01)) for i in range(2))
    mine = codec(name).correction(own, codec(name).read(own, exchanged(name, own, other)), 0.5)
    theirs = codec(name).correction(other, codec(name).read(other, exchanged(name, other, own)), 0.5)
    for one, opposite in zip(mine[:2], theirs[:2], strict=True):
        np.testing.assert_array_equal(one, -opposite)
    for one, same in zip(mine[2:], theirs[2:], strict=True):  # the windows to remember
        np.testing.assert_array_equal(one, same)
    assert any(x.any() for x in mine)
    alike = codec(name).correction(own, codec(name).read(own, exchanged(name, own, own)), 0.5)
    assert not any(x.any() for x in alike[:2])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", WIRES[:4])
def test_the_norm_of_a_message_with_a_value_that_is_not_finite_is_not_finite(name, value):
    own, arrays = message(name, values(0)), values(1)
    arrays[0][3, 40] = value
    read = codec(name).read(own, exchanged(name, own, message(name, arrays)))
    assert not np.isfinite(read.norm)


@pytest.mark.parametrize("name", WIRES)
def test_bytes_of_another_length_are_refused(name):
    own = message(name, values(0))
    parts = exchanged(name, own, own)
    for wrong in (parts[-1][:-1], parts[-1] + b"x", b""):
        with pytest.raises(ProtocolError):
            codec(name).read(own, [*parts[:-1], wrong])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", ["int8", "int4", "modulo4"])
def test_random_bytes_decode_to_something_or_to_a_norm_that_is_not_finite(name, seed):
    own, rng = message(name, values(0)), np.random.default_rng(seed)
    parts = [rng.integers(0, 256, size, np.uint8).tobytes() for size in codec(name).sizes]
    read = codec(name).read(own, parts)
    assert len(codec(name).correction(own, read, 0.5)) == len(own.arrays)


def test_windows_of_a_pair_are_the_larger_ones_within_the_reach_of_the_more_modest():
    mine, theirs = np.array([[10, 20, BROKEN]], np.uint8), np.array([[15, 200, 3]], np.uint8)
    (found,) = pair_windows([mine], [theirs])
    np.testing.assert_array_equal(found, [[15, 20 + MAX_WINDOW, BROKEN]])
    np.testing.assert_array_equal(found, pair_windows([theirs], [mine])[0])


SPECS = [
    ArraySpec((3, 300), np.dtype(np.float32)),
    ArraySpec((4,), np.dtype(np.int32)),
    ArraySpec((), np.dtype(np.int64)),
]


def state() -> dict[int, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        0: rng.normal(size=(3, 300)).astype(np.float32),
        1: np.arange(4, dtype=np.int32),
        2: np.int64(2**40) + np.zeros((), np.int64),
    }


def small_of(forms: StateCodec, kind: int, leaves: dict[int, np.ndarray]) -> bytes:
    return pack([leaves[number] for number in forms.small]) if kind == CATCH_UP else b""


@pytest.mark.parametrize("kind", [EXACT, CATCH_UP])
def test_weights_travel_exactly_or_in_eight_bits_and_what_goes_with_them_exactly(kind):
    forms, leaves = StateCodec(SPECS, 1, carried=[2]), state()
    data = forms.encode(kind, leaves)
    assert len(data) == forms.num_bytes(kind)
    assert len(data) < 0.3 * 4 * 900 or kind != CATCH_UP
    found = forms.decode(kind, data, small_of(forms, kind, leaves))
    assert found.keys() == {EXACT: {0}, CATCH_UP: {0, 2}}[kind]
    for number in found.keys() - {0}:
        np.testing.assert_array_equal(found[number], leaves[number])
    blocks = np.abs(np.pad(leaves[0].reshape(-1), (0, 124)).reshape(-1, 256)).max(axis=1)
    step = np.repeat(blocks / 127, 256)[:900].reshape(3, 300) if kind == CATCH_UP else 0.0
    assert (np.abs(found[0] - leaves[0]) <= 0.51 * step).all()


@pytest.mark.parametrize("kind", [EXACT, CATCH_UP])
def test_weights_that_are_not_finite_are_refused(kind):
    forms, leaves = StateCodec(SPECS, 1, carried=[2]), state()
    leaves[0][1, 7] = np.nan
    with pytest.raises(ProtocolError, match="not finite"):
        forms.decode(kind, forms.encode(kind, leaves), small_of(forms, kind, leaves))


@pytest.mark.parametrize("kind", [EXACT, CATCH_UP])
def test_a_state_of_ten_thousand_arrays_travels_in_seconds_and_its_position_in_one_message(kind):
    """Regression test: the time grew by the square of the number, and small arrays outgrew a message of 2 MiB."""
    rng = np.random.default_rng(0)
    leaves = {n: rng.normal(size=300).astype(np.float32) for n in range(10_000)} | {10_000: np.array(7)}
    forms = StateCodec([ArraySpec(x.shape, x.dtype) for x in leaves.values()], 5000, range(5000, 10_001))
    began = time.process_time()
    data, small = forms.encode(kind, leaves), small_of(forms, kind, leaves)
    assert len(data) == forms.num_bytes(kind) and len(small) < MAX_BYTES
    found = forms.decode(kind, data, small)
    assert time.process_time() - began < 10
    assert found.keys() == (set(range(5000)) if kind == EXACT else leaves.keys())
    assert kind == EXACT or 10_000 in forms.small  # counters come last
    for n, x in found.items():
        np.testing.assert_allclose(x, leaves[n], atol=np.abs(leaves[n]).max() / 127 if kind == CATCH_UP else 0)
