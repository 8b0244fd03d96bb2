"""Quantized messages of islands: payloads, and the corrections of two islands that exchange them."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noloco_jax import draws
from noloco_jax.config import TrainConfig, from_dict
from noloco_jax.exchange.blocks import block_counts
from noloco_jax.exchange.mean import MeanExchange
from noloco_jax.exchange.modulo import Modulo, encode_in, propose
from noloco_jax.exchange.wire import to_code, wire_of
from noloco_jax.island.membership import Membership
from noloco_jax.islands.payload import Codec, PlainCodec, Read, codec_of, pair_windows
from noloco_jax.outer.pairing import RandomPairing
from noloco_jax.outer.rule import Outgoing
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, build_programs
from noloco_jax.spmd.solo import SoloPrograms, build_solo
from noloco_jax.train.messages import messages_of
from support import tiny_model
from support.exchanges import LAST
from support.wires import ROUNDED

SHAPES = [(1, 5, 96), (1, 7)]  # the leading axis is the replica; the second array is shorter than a block


def config_of(wire: str, **mesh: int) -> TrainConfig:
    return from_dict(
        {
            "num_replicas": 4,
            "model": {"kind": tiny_model.KIND, "hidden_size": 16, "intermediate_size": 32, "num_layers": 1},
            "outer": {"wire": wire, "fragments": 2},
            "data": {"sequence_length": 8, "batch_size": 2},
            "mesh": mesh,
        }
    )


def programs_of(config: TrainConfig, devices: int) -> tuple[Programs, SoloPrograms]:
    """Build the programs of one island on `devices` devices."""
    own = dataclasses.replace(config, num_replicas=1, mesh=dataclasses.replace(config.mesh, replica=1))
    programs = build_programs(own, make_mesh(own, jax.devices()[:devices]))
    return programs, build_solo(own, programs)


@cache
def encoder(name: str) -> Callable[[list[np.ndarray]], list[jax.Array]]:
    """Return the program that encodes a message in the wire format `name`."""
    wire = wire_of(name)
    assert not isinstance(wire, Modulo)
    return jax.jit(lambda message: [jax.vmap(lambda x: wire.encode(to_code(wire, x)))(x) for x in message])


def encoded(name: str, message: list[np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(x) for x in encoder(name)(message)]


def codec_and_messages(name: str) -> tuple[PlainCodec, list[list[np.ndarray]], list[list[np.ndarray]]]:
    """Return a codec, two messages, and both messages encoded."""
    wire = wire_of(name)
    assert not isinstance(wire, Modulo)
    messages = [[np.random.default_rng(i).standard_normal(s).astype(np.float32) for s in SHAPES] for i in range(2)]
    sent = [encoded(name, message) for message in messages]
    return PlainCodec(wire, messages[0], sent[0]), messages, sent


@pytest.mark.parametrize("name", ["float32", *ROUNDED])
@pytest.mark.parametrize("weight", [0.5, 0.8])
def test_a_correction_is_the_weighted_difference_of_both_quantized_messages(name, weight):
    codec, messages, sent = codec_and_messages(name)
    rounded = ROUNDED.get(name, lambda x: x)
    for own, other in ((0, 1), (1, 0)):
        found = codec.correction(sent[own], sent[other], weight)
        for x, mine, theirs in zip(found, messages[own], messages[other], strict=True):
            expected = weight * (rounded(theirs[0]).astype(np.float64) - rounded(mine[0]))
            np.testing.assert_allclose(x[0], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ROUNDED)
def test_corrections_of_a_pair_are_exactly_opposite_and_zero_between_equal_islands(name):
    codec, _, sent = codec_and_messages(name)
    for mine, theirs in zip(
        codec.correction(sent[0], sent[1], 0.5), codec.correction(sent[1], sent[0], 0.5), strict=True
    ):
        np.testing.assert_array_equal(mine, -theirs)
        assert np.abs(mine).max() > 0.1
    assert not any(x.any() for x in codec.correction(sent[0], list(sent[0]), 0.5))


@pytest.mark.parametrize("name", ["float32", *ROUNDED])
def test_the_norm_of_a_message_is_correct_and_not_finite_with_a_nan(name):
    codec, messages, sent = codec_and_messages(name)
    norm = np.sqrt(sum((ROUNDED.get(name, lambda x: x)(x[0]).astype(float) ** 2).sum() for x in messages[0]))
    assert codec.read(sent[0], (), sent[0]).norm == pytest.approx(norm, rel=1e-5)
    broken = [x.copy() for x in messages[0]]
    broken[0][0, 3, 40] = np.nan
    assert not np.isfinite(codec.read(sent[0], (), encoded(name, broken)).norm)


WINDOWED, CUTS = Modulo("modulo4"), [1, 0]


@jax.jit
def kept_of(message: list[jax.Array], movement: list[jax.Array], remembered: list[jax.Array]) -> Any:
    """Return what an island keeps of its message: the windows that it proposes, and the message."""
    return jax.vmap(lambda m, moved, seen: (propose(WINDOWED, m, moved, seen, CUTS), m))(message, movement, remembered)


@jax.jit
def means_of(both: list[jax.Array], movement: list[jax.Array], remembered: list[jax.Array]) -> Any:
    """Return the means of two replicas' messages in one program, and the windows to remember."""
    axis = "replica"
    exchange = MeanExchange(RandomPairing(2, 2, 0), WINDOWED, axis)

    def mean(message: Any, moved: Any, seen: Any) -> Any:
        return exchange.mean(Outgoing(message, moved, seen), jnp.int32(0), LAST)

    return jax.vmap(mean, axis_name=axis)(both, movement, remembered)


@cache
def windowed_codec() -> Codec:
    """Return the codec of messages with `SHAPES`, as every pair of islands has one."""
    message = [np.zeros(shape, np.float32) for shape in SHAPES]
    counts = [block_counts(shape[1:], len(shape) - 2) for shape in SHAPES]
    seen = [np.zeros((1, *count), np.uint8) for count in counts]

    def encode(message: list[jax.Array], of_pair: list[jax.Array]) -> Any:
        return jax.vmap(lambda one, its: encode_in(WINDOWED, one, its, 0, CUTS))(message, of_pair)

    return codec_of(WINDOWED, message, (seen, jax.eval_shape(encode, message, seen)), CUTS)


class WindowedPair:
    """Pair of messages in a windowed format, with the payloads and corrections of both islands.

    Args:
      distance: standard deviation of each message from their shared values, which are about 1.
      moved: movement of the first array's values since the last exchange; the second array's is twice that.
      remembered: window that the last exchange left in every block.
    """

    def __init__(self, distance: float, moved: float = 0.05, remembered: int = 0):
        rng = np.random.default_rng(0)
        shared = [rng.standard_normal(shape) for shape in SHAPES]
        apart = [[distance * rng.standard_normal(shape) for shape in SHAPES] for _ in range(2)]
        self.messages = [[(x + d).astype(np.float32) for x, d in zip(shared, one, strict=True)] for one in apart]
        self.movement = [np.full(shape, moved * (1 + i), np.float32) for i, shape in enumerate(SHAPES)]
        counts = [block_counts(shape[1:], len(shape) - 2) for shape in SHAPES]
        self.remembered = [np.full((1, *count), remembered, np.uint8) for count in counts]

        kept = [kept_of(message, self.movement, self.remembered) for message in self.messages]
        self.kept = [[np.asarray(x) for x in jax.tree.leaves(one)] for one in kept]
        self.codec = windowed_codec()

    def read(self, own: int, sent: list[np.ndarray] | None = None) -> Read:
        """Return what island `own` reads of the other's message, or of `sent`."""
        other = 1 - own
        both = pair_windows(self.codec.windows(self.kept[own]) or (), self.codec.windows(self.kept[other]) or ())
        return self.codec.read(self.kept[own], both, sent or self.codec.payload(self.kept[other], both))

    def corrections(self, weights: tuple[float, float] = (0.5, 0.5)) -> list[list[np.ndarray]]:
        """Return the corrections of both islands: every array, then the windows to remember."""
        return [list(self.codec.correction(self.kept[i], self.read(i).arrays, weights[i])) for i in range(2)]


@pytest.mark.parametrize("remembered", [0, 100])
@pytest.mark.parametrize("distance", [0.01, 0.03, 10.0])
def test_windowed_corrections_equal_the_pair_mean_of_one_program(distance, remembered):
    """Some blocks are refused at the second distance, and nearly all at the third."""
    pair = WindowedPair(distance, remembered=remembered)
    both = [np.concatenate([one, other]) for one, other in zip(*pair.messages, strict=True)]
    others = [[np.concatenate([x, x]) for x in tree] for tree in (pair.movement, pair.remembered)]
    means, remembered_then = jax.device_get(means_of(both, *others))
    for i, found in enumerate(pair.corrections()):
        for message, correction, expected in zip(pair.messages[i], found, means, strict=False):
            np.testing.assert_array_equal(message[0] + correction[0], expected[i])
        for windows_found, expected in zip(found[2:], remembered_then, strict=True):
            np.testing.assert_array_equal(windows_found[0], expected[i])
    assert distance > 0.01 or np.abs(means[0] - both[0]).max() > distance


@pytest.mark.parametrize(("weights", "exact"), [((0.5, 0.5), True), ((0.2, 0.8), False)])
def test_windowed_corrections_cancel_by_weight(weights, exact):
    pair = WindowedPair(0.01)
    (mine, theirs) = pair.corrections(weights)
    for one, other in zip(mine[:2], theirs[:2], strict=True):
        np.testing.assert_allclose(weights[1] * one, -weights[0] * other, rtol=0 if exact else 1e-6)
    for message, other, correction in zip(*pair.messages, mine[:2], strict=True):
        assert (
            np.abs(correction - weights[0] * (other - message)).max() < weights[0] * 0.03
        )  # a quantization step of the second array
    for one, other in zip(mine[2:], theirs[2:], strict=True):
        np.testing.assert_array_equal(one, other)


def test_factors_scale_each_array_of_a_windowed_correction_and_no_window():
    pair = WindowedPair(0.01)
    read, factors = pair.read(0).arrays, (0.25, 1.0)
    whole, scaled = (pair.codec.correction(pair.kept[0], read, 0.5, each) for each in ((), factors))
    for before, after, factor in zip(whole, scaled, (*factors, 1.0, 1.0), strict=True):
        np.testing.assert_array_equal(after, factor * before)
        assert before.any()


def test_the_norm_of_a_windowed_message_is_correct_and_not_finite_with_a_nan():
    pair = WindowedPair(0.01)
    corrections = pair.corrections()[0][:2]  # of half the difference to the other message, as rounded
    received = [own.astype(float) + 2 * half for own, half in zip(pair.messages[0], corrections, strict=True)]
    assert pair.read(0).norm == pytest.approx(np.sqrt(sum((x**2).sum() for x in received)), rel=1e-6)
    broken = WindowedPair(0.01, moved=np.nan)
    assert not np.isfinite(broken.read(0).norm)


@pytest.mark.parametrize("name", ["int8", "modulo4"])
def test_a_message_takes_as_many_bytes_as_in_one_program(name):
    config = config_of(name)
    of_island = Membership.messages(config, programs_of(config, 1)[1])
    in_one = messages_of(config, make_mesh(config, jax.devices()[:4]).shape)
    assert of_island.outer_step == in_one.outer_step > 0


def test_islands_on_different_meshes_send_the_same_bits():
    """Quantization blocks divide whole arrays, not a device's shards."""
    sent = []
    for count in (1, 2):
        programs, solo = programs_of(config_of("int8", fsdp=count), count)
        state = programs.init(draws.key(0))
        assert state.outer is not None
        sent.append(jax.device_get(solo.step(state.params, state.outer)[2]))
    assert jax.tree.structure(sent[0]) == jax.tree.structure(sent[1])
    for alone, sharded in zip(*map(jax.tree.leaves, sent), strict=True):
        np.testing.assert_array_equal(alone, sharded)
