"""Mean of islands' weights without those that are out of line, against NumPy's."""

import numpy as np
import pytest

from noloco_jax.islands import checked_mean as module
from noloco_jax.islands.checked_mean import Arrays, apart, checked_mean

NAMES = ("paris", "berlin", "rome", "oslo")
SHAPES = [(7, 5), (31,), ()]


def honest(count: int, apart: float = 0.3) -> dict[str, Arrays]:
    """Return weights around a common point, so far apart in norms."""
    rng = np.random.default_rng(0)
    center, noise = [np.asarray(rng.normal(size=shape)) for shape in SHAPES], apart / 2**0.5
    return {
        name: [np.asarray(x + noise * rng.normal(size=x.shape), np.float32) for x in center] for name in NAMES[:count]
    }


def scaled(arrays: Arrays, factor: float) -> Arrays:
    return [x * np.float32(factor) for x in arrays]


def assert_mean(found: Arrays, *parts: Arrays) -> None:
    for x, *theirs in zip(found, *parts, strict=True):
        np.testing.assert_allclose(x, np.mean(theirs, axis=0), atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_honest_weights_are_all_in_the_mean(count):
    mean = checked_mean(honest(count))
    assert not mean.left_out
    assert_mean(mean.arrays, *honest(count).values())


@pytest.mark.parametrize("liar", NAMES)
@pytest.mark.parametrize("factor", [1e6, -1e6, 4.0, -1.5, np.nan, np.inf])
def test_wrong_weights_of_one_of_four_are_left_out_on_all_and_all_get_the_same_bits(liar, factor):
    weights = honest(4)
    weights[liar] = scaled(weights[liar], factor)
    first = checked_mean(weights, NAMES[0])
    assert first.left_out.keys() == {liar}
    assert ("not finite" if not np.isfinite(factor) else "norms away from the median") in first.left_out[liar]
    assert_mean(first.arrays, *(arrays for name, arrays in weights.items() if name != liar))
    for own in NAMES[1:]:
        for mine, theirs in zip(first.arrays, checked_mean(weights, own).arrays, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_two_of_five_cannot_move_the_mean():
    weights = honest(4) | {"madrid": scaled(honest(1)["paris"], 1e4)}
    weights["rome"] = scaled(weights["rome"], 1e6)
    mean = checked_mean(weights)
    assert mean.left_out.keys() == {"rome", "madrid"}
    assert_mean(mean.arrays, *(weights[name] for name in ("paris", "berlin", "oslo")))


# Measured in a run of the quickstart, in norms of the median of the others: islands of one round are 0.03 apart from
# their median; step 40 of 480, step 240, and step 480 among islands of step 40, whose norm is smaller.
@pytest.mark.parametrize(("distance", "scale"), [(0.66, 0.76), (0.35, 0.92), (0.92, 1.32)])
def test_an_honest_straggler_is_in_the_mean(distance, scale):
    rng = np.random.default_rng(1)
    base, other = rng.normal(size=(2, 100_000))
    weights: dict[str, Arrays] = {name: [base + 0.03 * rng.normal(size=base.size)] for name in NAMES[:3]}
    # In the plane of two orthogonal directions: of norm `scale`, at this distance from `base`.
    along = (1 + scale**2 - distance**2) / 2
    weights["oslo"] = [along * base + (scale**2 - along**2) ** 0.5 * other]
    assert np.linalg.norm(weights["oslo"][0] - base) / np.linalg.norm(base) == pytest.approx(distance, rel=0.02)
    for names in (NAMES, NAMES[1:]):
        mean = checked_mean({name: weights[name] for name in names})
        assert not mean.left_out
        assert_mean(mean.arrays, *(weights[name] for name in names))


def test_weights_that_began_at_zero_may_be_far_apart():
    rng = np.random.default_rng(2)
    weights: dict[str, Arrays] = {name: [rng.normal(size=1000)] for name in NAMES}
    weights["oslo"] = scaled(weights["oslo"], 3.0)
    assert not checked_mean(weights).left_out


@pytest.mark.parametrize(("own", "left"), [("paris", "berlin"), ("berlin", "paris")])
def test_of_two_islands_that_disagree_each_keeps_its_own_weights(own, left):
    weights = honest(2)
    weights["berlin"] = [x + 50 for x in weights["berlin"]]
    weights["paris"] = [x - 50 for x in weights["paris"]]
    weights[own] = honest(2)[own]
    mean = checked_mean(weights, own)
    assert mean.left_out.keys() == {left}
    assert_mean(mean.arrays, weights[own])


def test_of_two_islands_that_disagree_nobody_else_knows_which_is_wrong():
    weights = honest(2)
    weights["berlin"] = scaled(weights["berlin"], 1e6)
    for own in (None, "rome"):
        mean = checked_mean(weights, own)
        assert mean.is_undecided and not mean.arrays
        assert mean.left_out.keys() == {"paris", "berlin"} and "is not known" in mean.left_out["paris"]


def test_the_distance_from_a_reference_is_that_of_numpy_over_any_number_of_chunks(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 4)
    one, other = honest(2).values()
    flat, another = (np.concatenate([x.ravel() for x in arrays]) for arrays in (one, other))
    assert apart(one, other) == pytest.approx(np.linalg.norm(another - flat) / np.linalg.norm(flat))
    assert checked_mean(honest(4) | {"rome": scaled(one, 1e6)}).left_out.keys() == {"rome"}


@pytest.mark.parametrize("count", range(1, 10))
def test_the_median_is_that_of_numpy(count):
    values = np.random.default_rng(count).normal(size=(count, 1000)).astype(np.float32)
    np.testing.assert_allclose(module._median([*values]), np.median(values, axis=0), rtol=1e-6)


def test_large_finite_weights_do_not_overflow():
    weights = honest(4)
    weights["rome"] = [np.full_like(x, 3e38) for x in weights["rome"]]
    assert checked_mean(weights).left_out.keys() == {"rome"}
