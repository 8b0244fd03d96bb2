"""Shares of a state: cut between values or blocks and read from any donor, they reassemble to the arrays."""

import math
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from noloco_jax.islands import state_shares
from noloco_jax.islands.agent import Agent
from noloco_jax.islands.donor import Donor
from noloco_jax.islands.protocol.messages import Share, State
from noloco_jax.islands.state_shares import Assembly, layouts_of, state_wire

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def state(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [
        random.normal(0, 0.02, (3, 96, 80)).astype(np.float32),
        random.normal(0, 0.02, (80,)).astype(np.float32),
        random.normal(0, 0.02, (200, 72)).astype(BFLOAT16),
        random.normal(0, 1, (3, 96, 80)).astype(np.float32),
        np.asarray(17, np.int32),
        random.integers(0, 9, 2000).astype(np.uint8),
    ]


def transferred(layout, donors: list[list[np.ndarray]]) -> dict[int, np.ndarray]:
    """Return the arrays assembled from shares of the donors in turn, with the last donor's small arrays."""
    contents = [layout.encode(dict(enumerate(donor))) for donor in donors]
    assembly = Assembly(layout)
    for number in range(1, layout.count + 1):
        share = layout.share(contents[number % len(donors)], number)
        assert [share.shape] == [spec.shape for spec in layout.specs(number)] and layout.is_finite(number, share)
        assembly.put(number, share)
    small = [donors[-1][leaf] for leaf in layout.small]
    assert [x.shape for x in small] == [spec.shape for spec in layout.specs(0)][1:]
    return assembly.leaves(small)


@pytest.fixture(autouse=True)
def small_shares(monkeypatch):
    monkeypatch.setattr(state_shares, "SHARE_BYTES", 1000)


def test_a_whole_state_is_transferred_exactly():
    one = state(0)
    layout = layouts_of(one, 3, "int4").whole
    assert layout.count > 100 and layout.small == [4]
    found = transferred(layout, [one])
    assert found.keys() == set(range(6))
    for number, x in found.items():
        np.testing.assert_array_equal(x, one[number])
        assert x.dtype == one[number].dtype


@pytest.mark.parametrize(
    ("wire", "bytes_", "error"),
    [("float32", 4, 0), ("bfloat16", 2, 2**-8), ("int8", 1, 1 / 254), ("modulo4", 1, 1 / 254)],
)
def test_weights_take_the_bytes_of_their_wire_format_within_its_error(wire, bytes_, error):
    one = state(0)
    layout = layouts_of(one, 3, wire).weights
    quantized = one[0].size * bytes_ + one[2].size * min(bytes_, 2) + 4 * 80
    assert quantized <= layout.nbytes < 1.15 * quantized
    found = transferred(layout, [one])
    assert found.keys() == {0, 1, 2}
    np.testing.assert_array_equal(found[1], one[1])  # small arrays are exact
    for number in (0, 2):
        x, y = found[number].astype(np.float32), one[number].astype(np.float32)
        assert found[number].dtype == one[number].dtype
        scale = np.abs(y) if wire == "bfloat16" else np.abs(y).max()
        rounding = 2**-8 * np.abs(y) * (one[number].dtype == BFLOAT16)  # for an array that is bfloat16 itself
        assert (np.abs(x - y) <= 1.02 * error * scale + rounding).all()


def test_shares_of_two_donors_reassemble_to_values_of_either():
    donors = [state(0), state(1)]
    found = transferred(layouts_of(donors[0], 3, "int8").weights, donors)[0]
    near = [np.abs(found - donor[0]) < 1e-3 for donor in donors]
    assert (near[0] | near[1]).all() and 0.3 < np.mean(near[0]) < 0.7


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_share_with_a_non_finite_value_is_detected(wire, value):
    one = state(0)
    one[0][1, 50, 33] = value
    layout = layouts_of(one, 3, wire).weights
    content = layout.encode(dict(enumerate(one)))
    bad = [n for n in range(1, layout.count + 1) if not layout.is_finite(n, layout.share(content, n))]
    assert len(bad) == 1


def test_weights_are_sent_in_int8_where_the_wire_format_has_fewer_bits():
    assert [state_wire(wire) for wire in ("float32", "bfloat16", "int8", "int4", "modulo4")] == [
        "float32",
        "bfloat16",
        "int8",
        "int8",
        "int8",
    ]


def test_a_request_during_a_donors_copy_is_served_from_the_next_copy():
    one, sent = state(0), []
    layouts = layouts_of(one, 3, "int8")
    donor = Donor(layouts, lambda channel, header, arrays: sent.append((channel, header.round)), sent.append)
    donor.ask("first", State(0, False, Share(1, False)))
    wanted = donor.wanted
    donor.ask("second", State(0, True, Share(0, True)))
    donor.ask("third", State(0, True, Share(1, True)))
    donor.give(7, 70, {leaf: one[leaf] for leaf in wanted})
    assert sent == [("first", 7)] and donor.is_waited_for
    donor.give(8, 80, {leaf: one[leaf] for leaf in donor.wanted})
    assert sent == [("first", 7), ("second", 8), ("third", 8)] and not donor.is_waited_for


def test_a_donor_ends_a_call_for_a_share_that_does_not_exist():
    ended = []
    layouts = layouts_of(state(0), 3, "int8")
    donor = Donor(layouts, lambda channel, header, arrays: pytest.fail("given"), ended.append)
    for number in (-1, layouts.weights.count + 1):
        donor.ask(number, State(0, False, Share(number, False)))
    assert ended == [-1, layouts.weights.count + 1] and not donor.is_waited_for


def test_a_donor_reuses_its_copy_in_later_rounds_until_it_is_too_old(monkeypatch):
    one, sent = state(0), []
    donor = Donor(layouts_of(one, 3, "int8"), lambda channel, header, arrays: sent.append(header.round), sent.append)
    for number, round in ((1, 7), (2, 8)):
        donor.ask("a", State(0, False, Share(number, False)))
        if donor.is_waited_for:
            donor.give(round, 10 * round, {leaf: one[leaf] for leaf in donor.wanted})
    assert sent == [7, 7]
    monkeypatch.setattr("noloco_jax.islands.donor._LONGEST_SECONDS", 0.0)
    donor.ask("a", State(0, False, Share(3, False)))
    donor.give(9, 90, {leaf: one[leaf] for leaf in donor.wanted})
    assert sent == [7, 7, 9]


@pytest.mark.parametrize(("step", "is_taken"), [(80, True), (79, False), (-1, False), (2**62, False)])
def test_a_state_at_an_impossible_step_is_refused(step, is_taken):
    one = state(0)
    layout = layouts_of(one, 3, "int8").weights
    assembly = Assembly(layout)
    for number in range(1, layout.count + 1):
        assembly.put(number, layout.share(layout.encode(dict(enumerate(one))), number))
    fits = lambda round, step: step == 10 * (round + 1)  # noqa: E731
    agent: Any = SimpleNamespace(_layout=layout, _assembly=assembly, _fits=fits)
    content, _ = Agent._read_share(agent, 7, 0, [np.asarray(step, np.int64), *(one[leaf] for leaf in layout.small)])
    assert math.isfinite(content.norm) == is_taken


def test_finiteness_is_right_for_large_float64_and_complex_values():
    one = [np.full((3, 500), 1e300), np.full(600, 1 + 2j)]
    layout = layouts_of(one, 1, "float32").whole

    def found(arrays) -> bool:
        content = layout.encode(dict(enumerate(arrays)))
        return all(layout.is_finite(number, layout.share(content, number)) for number in range(1, layout.count + 1))

    assert found(one)
    assert not found([one[0], np.full(600, 1 + np.inf * 1j)])
