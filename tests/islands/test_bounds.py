"""Bounds: what a correction may move, with one factor on both sides, and what one member of many can do."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from noloco_jax.islands.bounds import EARLY, FIRST, GROWTH, KEPT, MULTIPLE, Bounds, Distance, agreed
from support.island_world import Sea, Sim


def accepted(sizes: list[float]) -> Bounds:
    bounds = Bounds()
    for size in sizes:
        bounds.accept(size, 1.0, 1.0)
    return bounds


@pytest.mark.parametrize(("count", "multiple"), [(3, EARLY), (KEPT, MULTIPLE), (2 * KEPT, MULTIPLE)])
def test_a_correction_is_clipped_at_a_multiple_of_the_median(count, multiple):
    sizes = [1.0 + i % 3 for i in range(count)]
    median = float(np.median(sizes[-KEPT:]))
    bounds = accepted(sizes)
    assert bounds.factor(multiple * median, 1e9) == 1.0
    assert bounds.factor(100.0, 1e9) == pytest.approx(multiple * median / 100)


def test_before_a_median_is_known_the_own_message_gives_the_bound():
    assert Bounds().factor(FIRST, 1.0) == 1.0
    assert Bounds().factor(10.0, 1.0) == pytest.approx(FIRST / 10)


def test_a_bound_grows_with_exchanges_that_it_clips_and_shrinks_again():
    bounds = accepted([1.0] * KEPT)
    factor = bounds.factor(100.0, 1e9)
    bounds.accept(100.0, factor, factor)
    assert bounds.factor(100.0, 1e9) == pytest.approx(GROWTH * factor)
    bounds.accept(1.0, 1.0, 1.0)
    assert bounds.factor(100.0, 1e9) == pytest.approx(factor)


def test_bounds_continue_from_their_saved_form():
    bounds = accepted([1.0, 2.0, 3.0])
    bounds.accept(100.0, 0.1, 0.1)
    assert Bounds(bounds.to_json()).factor(50.0, 1e9) == bounds.factor(50.0, 1e9)


@pytest.mark.parametrize(
    ("own", "other", "both"), [(0.5, 0.25, 0.25), (0.25, 0.5, 0.25), (1.0, 0.0, 1.0), (0.0, 0.5, 0.0)]
)
def test_both_sides_apply_the_smaller_factor_unless_one_takes_nothing(own, other, both):
    assert agreed(own, other) == both


def test_a_peer_is_far_until_it_comes_closer():
    distance = Distance()
    for size, count in ((10.0, 1), (10.0, 2), (9.5, 3), (8.0, 1), (8.0, 2)):
        distance = distance.after(size, 0.1)
        assert distance.count == count
    assert distance.after(1.0, 0.9) == Distance()


POISONS = {
    "sign flip": lambda message: -message,
    "times 5": lambda message: 5 * message,
    "one number": lambda message: message + 3 * np.eye(len(message))[0],
}


async def test_one_of_eight_that_sends_poison_moves_the_mean_of_the_others_little():
    names = list("abcdefgh")

    async def run(poison: Callable[[np.ndarray], np.ndarray] | None) -> np.ndarray:
        sea = Sea(names, steps_a_round=1, step_seconds=1.0)
        sims = [sea.add(name) for name in names]
        if poison:
            sims[-1].tamper = poison
        await asyncio.gather(*(sim.train(200) for sim in sims))
        return np.array([sim.slow for sim in sims[:-1]])

    clean = await run(None)
    spread = np.sqrt(np.mean(np.sum((clean - clean.mean(0)) ** 2, axis=1)))
    for kind, poison in POISONS.items():  # without bounds a sign flip moves it by 13 spreads within these rounds
        assert np.linalg.norm((await run(poison)).mean(0) - clean.mean(0)) < 2 * spread, kind


class Walker(Sim):
    """Trains on noise alone, so that nothing pulls it back."""

    def end_round(self) -> None:
        self.target = self.slow + np.random.default_rng([ord(self.name), self.step]).normal(size=self.slow.size)
        super().end_round()


@pytest.mark.parametrize("factor", [1.9, 3.9])
async def test_one_of_four_that_pushes_the_others_apart_does_not_drive_them_off(factor):
    """It knows their medians, and stays below the factor from which on a peer is far: of three it drives both off."""
    sea = Sea("abcd", steps_a_round=1, step_seconds=1.0)
    sea.islands = {name: Walker(sea, name) for name in sea.names}
    *honest, liar = sea.islands.values()

    def push(message: np.ndarray) -> np.ndarray:
        victim = sea.islands[liar.node.table.partner(liar.node.table.round + 1) or "a"]
        sizes = victim.node.meetings.to_json()["bounds"]["accepted"] or [0.05]
        sign = -1 if victim.name == "b" else 1
        return victim.slow + sign * factor * float(np.median(sizes)) * 2 * np.eye(4)[0]

    liar.tamper = push
    await asyncio.gather(*(sim.train(400) for sim in sea.islands.values()))
    weights = np.array([sim.slow for sim in honest])
    assert np.linalg.norm(weights - weights.mean(0), axis=1).max() < 2  # 0.3 to 0.5 without it; of three 1e6 and more
    assert np.linalg.norm(weights.mean(0)) < 60  # the noise alone makes it walk by 4


async def test_corrections_of_a_clipped_exchange_sum_to_zero():
    sea = Sea("ab")
    a, b = sea.add("a"), sea.add("b")
    a.target, b.target = np.full(4, 10.0), np.full(4, -10.0)
    await asyncio.gather(a.train(400), b.train(400))
    assert any(outcome.factor < 1 for outcome in a.outcomes)
    ours, theirs = dict(a.applied), dict(b.applied)
    for round in ours.keys() & theirs.keys():
        np.testing.assert_allclose(ours[round] + theirs[round], 0.0, atol=1e-12)
