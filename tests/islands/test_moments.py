"""Inner-optimizer moments in the messages of islands: their payload, the bound on a correction, and its decay."""

from concurrent.futures import Future
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from noloco_jax import draws
from noloco_jax.config import TrainConfig
from noloco_jax.island.membership import Membership
from noloco_jax.islands.agent import Correction
from noloco_jax.islands.payload import Codec
from noloco_jax.islands.protocol.messages import Message, Windows
from noloco_jax.islands.steps import IslandSteps
from noloco_jax.outer.moments import moments_of
from noloco_jax.spmd.programs import TrainState
from noloco_jax.wires import moments_wire
from support.training_islands import World, small
from support.wires import ROUNDED

NORM = "norm"  # an array that every wire sends as one block


def with_random_moments(world: World, seed: int) -> TrainState:
    """Return the initial state with random moments, none of them negative."""
    rng = np.random.default_rng(seed)
    state = world.programs.init(draws.key(0))
    moments = dict(jax.tree.leaves_with_path(moments_of(state.inner, state.params)))

    def one(path: tuple, x: Any) -> Any:
        if path not in moments:
            return x
        return jax.device_put(np.abs(rng.normal(size=x.shape)).astype(x.dtype), x.sharding)

    return state._replace(inner=jax.tree.map_with_path(one, state.inner))


def message_of(world: World, state: TrainState, round: int = 0) -> list[np.ndarray]:
    """Return the arrays that an island keeps of its own message; the arrays of `state` are donated."""
    assert world.solo.moments is not None
    _, _, kept, _ = world.solo.step(state.params, state.outer)
    arrays = jax.tree.leaves((kept, world.solo.moments.send(state.inner, np.int32(round))))
    return [np.asarray(x) for x in jax.device_get(arrays)]


def exchanged(world: World, codec: Codec, own: Any, other: Any, weight: float) -> tuple[Any, Any]:
    """Return the decoded message of the other island, and the correction of the moments as a tree."""
    windows = codec.windows(own)
    both = (
        () if windows is None else [np.maximum(x, y) for x, y in zip(windows, codec.windows(other) or (), strict=True)]
    )
    read = codec.read(own, both, codec.payload(other, both))
    assert world.solo.moments is not None
    structure = jax.tree.structure(world.solo.moments.sent)
    return read, structure.unflatten(codec.correction(own, read.arrays, weight)[-structure.num_leaves :])


@cache
def _world(**outer: Any) -> World:
    return World(small(**outer), None)


def worlds_of(tmp_path: Any, moments: int = 1, wire: str = "float32", **outer: Any) -> tuple[World, Codec]:
    """Return islands whose programs are those of every test with these settings, in a folder of their own."""
    world = _world(moments=moments, wire=wire, **outer)
    world.begin(tmp_path)
    return world, world.codec


def by_name(inner: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the second moment of a parameter, in float64."""
    adam = next(part for part in jax.tree.leaves(inner, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(part, "mu"))
    return np.asarray(adam.mu[name], np.float64), np.asarray(adam.nu[name], np.float64)


@pytest.mark.parametrize("wire", ["float32", "modulo4"])
def test_a_correction_averages_first_moments_and_the_roots_of_second_moments(wire, tmp_path):
    world, codec = worlds_of(tmp_path, wire=wire)
    states = [with_random_moments(world, seed) for seed in (1, 2)]
    (mu, nu), (other_mu, other_nu) = (by_name(state.inner, NORM) for state in states)
    rounded = ROUNDED.get(moments_wire(wire), lambda x: x)
    own, other = (message_of(world, state) for state in states)
    _, change = exchanged(world, codec, own, other, 0.4)
    found_mu, found_nu = by_name(change, NORM)

    def moved(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        mine, theirs = mine[0].astype(np.float32), theirs[0].astype(np.float32)
        return mine + 0.4 * (rounded(theirs).astype(np.float64) - rounded(mine))

    np.testing.assert_allclose(found_mu[0], moved(mu, other_mu) - mu[0], atol=1e-5)
    root = np.maximum(moved(np.sqrt(nu), np.sqrt(other_nu)), np.sqrt(nu[0]) / 2)
    np.testing.assert_allclose(found_nu[0], root**2 - nu[0], atol=1e-5)


def test_a_correction_is_clipped_to_the_norm_of_the_own_moment(tmp_path):
    world, codec = worlds_of(tmp_path)
    states = [with_random_moments(world, seed) for seed in (1, 2)]
    mu, _ = by_name(states[0].inner, NORM)
    own, other = (message_of(world, state) for state in states)
    count = len(jax.tree.leaves(world.solo.kept))
    poisoned = [*other[:count], *(1e6 * x for x in other[count:])]
    _, change = exchanged(world, codec, own, poisoned, 0.5)
    found, _ = by_name(change, NORM)
    np.testing.assert_allclose(np.linalg.norm(found), np.linalg.norm(mu), rtol=1e-5)


@pytest.mark.parametrize("wire", ["float32", "modulo4"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_moments_make_the_norm_of_their_message_non_finite(wire, value, tmp_path):
    world, codec = worlds_of(tmp_path, wire=wire)
    states = [with_random_moments(world, seed) for seed in (1, 2)]

    def damaged(x: Any) -> Any:
        return x.at[(0,) * x.ndim].set(value) if x.ndim > 1 else x

    bad = states[1]._replace(inner=jax.tree.map(damaged, states[1].inner))
    own, good = (message_of(world, state) for state in (states[0], with_random_moments(world, 2)))
    assert np.isfinite(exchanged(world, codec, own, good, 0.5)[0].norm)
    assert not np.isfinite(exchanged(world, codec, own, message_of(world, bad), 0.5)[0].norm)


@pytest.mark.parametrize("wire", ["float32", "modulo4"])
def test_every_second_round_of_a_fragment_sends_moments_and_counts_their_bytes(wire, tmp_path):
    world, codec = worlds_of(tmp_path, moments=2, fragments=2, wire=wire)
    messages = Membership.messages(world.config, world.solo)
    assert world.solo.moments is not None
    of_moments = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(world.solo.moments.code))
    sizes = []
    for round in range(8):
        specs = codec.specs(round)
        sizes.append(sum(spec.nbytes for kind in specs for spec in specs[kind]))
        assert messages.of_outer_step(round) == sizes[-1]
        assert set(specs) == {Message.__name__, *([Windows.__name__] if wire == "modulo4" else [])}
    assert np.diff(sizes).tolist() == [0, -of_moments, 0, of_moments, 0, -of_moments, 0]


def test_a_late_correction_decays_with_every_inner_step_since_its_message(tmp_path):
    world, codec = worlds_of(tmp_path)
    state, other = with_random_moments(world, 1), message_of(world, with_random_moments(world, 2))
    mu, nu = by_name(state.inner, NORM)
    sent: dict[int, list[np.ndarray]] = {}
    inbox: list[Correction] = []
    agent: Any = SimpleNamespace(
        stride=lambda most: 1,
        end_round=lambda round, tokens, arrays, norm: sent.update({round: arrays}),
        pause=lambda: 0.0,
        is_exchanging=False,
        take=lambda: inbox,
        wants_state=False,
        is_removed=False,
        snapshots=SimpleNamespace(wanted=False),
    )
    member = Membership(world.roster, "paris", None)
    island: IslandSteps = member.steps(world.own, agent, world.solo, world.programs)
    state, _ = island.advance(state, 0, 9)
    state = island.take(state, 1, 1)
    for step in range(1, 4):
        state, _ = island.advance(state, step, 9)
    arrays: Future[Any] = Future()
    read, change = exchanged(world, codec, sent[0], other, 0.5)
    arrays.set_result(codec.correction(sent[0], read.arrays, 0.5))
    inbox.append(Correction(0, arrays))
    state, _ = island.enter(state, 4)
    inner = TrainConfig().inner
    for found, own, correction, decay in zip(
        by_name(state.inner, NORM), (mu, nu), by_name(change, NORM), (inner.b1, inner.b2), strict=True
    ):
        np.testing.assert_allclose(found, own + decay**3 * correction, rtol=1e-5)
