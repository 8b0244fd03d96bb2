"""Messages of islands in few bits: what travels, and what becomes of two that have met."""

import dataclasses

import jax
import numpy as np
import pytest

from noloco_jax import draws
from noloco_jax.config import TrainConfig, from_dict
from noloco_jax.exchange.modulo import Modulo
from noloco_jax.exchange.wire import to_code, wire_of
from noloco_jax.islands.codes import Codes
from noloco_jax.run.island import Membership
from noloco_jax.run.messages import messages_of
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, build_programs
from noloco_jax.spmd.solo import SoloPrograms, build_solo
from support.wires import ROUNDED

SHAPES = [(1, 5, 96), (1, 7)]  # of the leading replica; the second is shorter than a block


def config_of(wire: str, **mesh: int) -> TrainConfig:
    return from_dict(
        {
            "num_replicas": 4,
            "model": {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2},
            "outer": {"wire": wire, "fragments": 2},
            "data": {"sequence_length": 8, "batch_size": 2},
            "mesh": mesh,
        }
    )


def programs_of(config: TrainConfig, devices: int) -> tuple[Programs, SoloPrograms]:
    """Of one island, on so many devices."""
    own = dataclasses.replace(config, num_replicas=1, mesh=dataclasses.replace(config.mesh, replica=1))
    programs = build_programs(own, make_mesh(own, jax.devices()[:devices]))
    return programs, build_solo(own, programs)


def encoded(name: str, message: list[np.ndarray]) -> list[np.ndarray]:
    """A message as it travels."""
    wire = wire_of(name)
    assert not isinstance(wire, Modulo)
    encode = jax.jit(lambda message: [jax.vmap(lambda x: wire.encode(to_code(wire, x)))(x) for x in message])
    return [np.asarray(x) for x in encode(message)]


def codes_of(name: str) -> tuple[Codes, list[list[np.ndarray]], list[list[np.ndarray]]]:
    """A code, two messages, and the two as they travel."""
    wire = wire_of(name)
    assert not isinstance(wire, Modulo)
    messages = [[np.random.default_rng(i).standard_normal(s).astype(np.float32) for s in SHAPES] for i in range(2)]
    sent = [encoded(name, message) for message in messages]
    return Codes(wire, messages[0], sent[0]), messages, sent


@pytest.mark.parametrize("name", ["float32", *ROUNDED])
@pytest.mark.parametrize("weight", [0.5, 0.8])
def test_a_correction_is_the_weighted_difference_of_what_both_have_rounded(name, weight):
    codes, messages, sent = codes_of(name)
    rounded = ROUNDED.get(name, lambda x: x)
    for own, other in ((0, 1), (1, 0)):
        found = codes.correction(sent[own], sent[other], weight)
        for x, mine, theirs in zip(found, messages[own], messages[other], strict=True):
            expected = weight * (rounded(theirs[0]).astype(np.float64) - rounded(mine[0]))
            np.testing.assert_allclose(x[0], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ROUNDED)
def test_corrections_of_a_pair_are_exactly_opposite_and_those_of_equal_islands_nothing(name):
    codes, _, sent = codes_of(name)
    for mine, theirs in zip(
        codes.correction(sent[0], sent[1], 0.5), codes.correction(sent[1], sent[0], 0.5), strict=True
    ):
        np.testing.assert_array_equal(mine, -theirs)
        assert np.abs(mine).max() > 0.1
    assert not any(x.any() for x in codes.correction(sent[0], list(sent[0]), 0.5))


@pytest.mark.parametrize("name", ["float32", *ROUNDED])
def test_a_message_with_a_broken_value_has_no_finite_norm(name):
    codes, messages, sent = codes_of(name)
    norm = np.sqrt(sum((ROUNDED.get(name, lambda x: x)(x[0]).astype(float) ** 2).sum() for x in messages[0]))
    assert codes.norm(sent[0]) == pytest.approx(norm, rel=1e-5)
    broken = [x.copy() for x in messages[0]]
    broken[0][0, 3, 40] = np.nan
    assert not np.isfinite(codes.norm(encoded(name, broken)))


@pytest.mark.parametrize("name", ["bfloat16", "int6"])
def test_a_message_takes_the_bytes_that_it_takes_in_one_program(name):
    config = config_of(name)
    of_island = Membership.messages(programs_of(config, 1)[1])
    in_one = messages_of(config, make_mesh(config, jax.devices()[:4]).shape)
    assert of_island.of_outer_step(0) == in_one.of_outer_step(0) > 0


def test_islands_on_different_meshes_send_the_same_bits():
    """The blocks of a code are of whole arrays, not of what a device holds."""
    sent = []
    for count in (1, 2):
        programs, solo = programs_of(config_of("int6", fsdp=count), count)
        state = programs.init(draws.key(0))
        assert state.outer is not None
        sent.append(jax.device_get(solo.step(state.params, state.outer)[2]))
    assert jax.tree.structure(sent[0]) == jax.tree.structure(sent[1])
    for alone, sharded in zip(*map(jax.tree.leaves, sent), strict=True):
        np.testing.assert_array_equal(alone, sharded)
