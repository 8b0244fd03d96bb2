"""Exchanges between CPU processes: swaps as sums, all-to-alls as shifts, and one message for a mean."""

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import noloco_jax as nj
from noloco_jax.optim.exchange import swap
from noloco_jax.optim.exchange.all_reduce import AllExchange, all_mean
from noloco_jax.optim.exchange.mean import MeanExchange
from noloco_jax.optim.exchange.modulo import Modulo
from noloco_jax.optim.exchange.swap import NOWHERE, move_by_sums
from noloco_jax.optim.exchange.wire import wire_of
from noloco_jax.optim.rule import Outgoing
from noloco_jax.spmd.traffic import collectives_of
from support.exchanges import LAST

DEVICES = 8
DESTINATIONS = {
    "all in pairs": [1, 0, 7, 5, 6, 3, 4, 2],
    "pairs, a ring and one that stays": [3, 4, 2, 0, 6, 7, 1, 5],
    "a pair, others stay": [0, 6, 2, 3, 4, 5, 1, 7],
    "a pair, others send to nobody": [1, 0, *[NOWHERE] * 6],
    "a pair and a chain": [1, 0, 3, 4, NOWHERE, NOWHERE, NOWHERE, NOWHERE],
    "a ring": [1, 2, 3, 4, 5, 6, 7, 0],
}


@pytest.mark.parametrize(
    ("destinations", "dtype"),
    [
        *((destinations, np.float32) for destinations in DESTINATIONS.values()),
        *((DESTINATIONS["all in pairs"], dtype) for dtype in (np.uint16, np.uint8, np.int8)),
    ],
)
def test_sums_deliver_the_bits_of_every_array_to_its_destination(destinations, dtype):
    bits = np.random.default_rng(0).integers(0, 256, (DEVICES, 3, 5 * np.dtype(dtype).itemsize), dtype=np.uint8)
    values = bits.view(dtype)  # every pattern of bits: NaNs with their payloads, infinities, subnormal numbers, zeros
    expected = np.zeros_like(bits)
    for source, to in enumerate(destinations):
        if to != NOWHERE:
            expected[to] = bits[source]
    mesh = jax.make_mesh((DEVICES,), ("replica",), (AxisType.Auto,))
    body = partial(move_by_sums, destinations=destinations, device_axes=("replica",))
    moved = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"), check_vma=False))
    np.testing.assert_array_equal(np.asarray(moved(values)).view(np.uint8), expected)


AXES = ("replica", "slot")
INT4: Any = wire_of("int4")


def over_devices(fn: Callable[..., Any], num_devices: int) -> Callable[..., Any]:
    """Return a function of 8 stacked replicas on so many devices, as the trainer runs it."""
    slots = jax.vmap(fn, axis_name="slot", axis_size=8 // num_devices)
    mesh = jax.make_mesh((num_devices,), ("replica",), (AxisType.Auto,), devices=jax.devices()[:num_devices])
    return jax.jit(jax.shard_map(slots, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"), check_vma=False))


def means(monkeypatch: pytest.MonkeyPatch, processes: int, exchange: Any, devices: int) -> tuple[Any, set[str]]:
    """Return what an exchange of some processes gives on random messages, and the collectives of its program."""
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(swap, "SMALL_BYTES", 0)
    rng = np.random.default_rng(0)
    message, movement = ({"w": rng.standard_t(3, (8, 5, 130)).astype(np.float32)} for _ in range(2))
    windows = {"w": np.zeros((8, 5, 3), np.float32)} if isinstance(getattr(exchange, "wire", None), Modulo) else None
    program = over_devices(lambda *trees: exchange.mean(Outgoing(*trees), jnp.int32(1), LAST), devices)
    names = set(re.findall(r"\w+", str(jax.make_jaxpr(program)(message, movement, windows))))
    return jax.device_get(program(message, movement, windows)), names & {"ppermute", "psum", "all_to_all"}


@pytest.mark.parametrize("devices", [8, 4])
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int4", "modulo4"])
def test_pairs_of_cpu_processes_exchange_by_sums_with_the_bits_of_permutations(wire, devices, monkeypatch):
    exchange = MeanExchange(nj.RandomPairing(8), wire_of(wire), AXES)
    alone, by_permutations = means(monkeypatch, 1, exchange, devices)
    several, by_sums = means(monkeypatch, 4, exchange, devices)
    assert (by_permutations, by_sums) == ({"ppermute"}, {"psum"})
    jax.tree.map(np.testing.assert_array_equal, alone, several)


@pytest.mark.parametrize(
    "pairing", [nj.RandomPairing(8, 4), nj.RandomPairing(8, 3), nj.RandomNeighbours(8, 3)], ids=["4", "3", "graph"]
)
def test_groups_and_graphs_of_cpu_processes_have_the_bits_of_permutations(pairing, monkeypatch):
    exchange = MeanExchange(pairing, wire_of("int8"), AXES)
    alone, _ = means(monkeypatch, 1, exchange, 8)
    several, _ = means(monkeypatch, 4, exchange, 8)
    jax.tree.map(np.testing.assert_array_equal, alone, several)


@pytest.mark.parametrize("devices", [8, 4])
def test_dilocos_quantized_mean_of_cpu_processes_has_the_bits_of_an_all_to_all(devices, monkeypatch):
    exchange = AllExchange(INT4, AXES)
    alone, by_one = means(monkeypatch, 1, exchange, devices)
    several, by_shifts = means(monkeypatch, 4, exchange, devices)
    assert "all_to_all" in by_one and "all_to_all" not in by_shifts
    jax.tree.map(np.testing.assert_array_equal, alone, several)


def test_where_shard_map_tracks_what_varies_cpu_processes_swap_by_permutations(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(swap, "SMALL_BYTES", 0)
    mesh = jax.make_mesh((8,), ("replica",), (AxisType.Auto,))
    outer = nj.noloco(nj.RandomPairing(8))
    step = jax.jit(jax.shard_map(jax.vmap(outer.step), mesh=mesh, in_specs=P("replica"), out_specs=P("replica")))
    params = {"w": np.arange(8.0, dtype=np.float32)[:, None] * np.ones((8, 5), np.float32)}
    stepped, _ = step(params, jax.vmap(outer.init)(params))
    assert np.var(stepped["w"], axis=0).max() < np.var(params["w"], axis=0).max()


def choice(
    monkeypatch: pytest.MonkeyPatch,
    num_bytes: int,
    rate: float,
    buffer: int,
    *,
    is_slow: bool = True,
    platforms: tuple[str, ...] = ("cpu", "cpu"),
) -> tuple[str | None, bool | None, int]:
    """Return the line of `choose_form`, whether sums were chosen, and the longest message, in bytes, that was swapped.

    Sums send at `rate`, bytes a second. On slow links, permutations send what `buffer` does not take at half of it; on
    fast ones at twice of it.
    """
    lengths: list[int] = []

    def program(form: Any, mesh: Any, length: int) -> Callable[[], float]:
        lengths.append(4 * length)
        waiting = max(4 * length - buffer, 0) / rate
        by_permutation = 4 * length / rate + waiting if is_slow else 2 * length / rate
        return lambda: 4 * length / rate if form is swap.move_by_sums else by_permutation

    monkeypatch.setattr(swap, "_swap_program", program)
    monkeypatch.setattr(swap, "_sums_are_faster", None)
    devices = [SimpleNamespace(platform=platform, process_index=i) for i, platform in enumerate(platforms)]
    mesh: Any = SimpleNamespace(devices=np.array(devices), shape={"replica": 2})
    line = swap.choose_form(mesh, num_bytes)
    return line, swap._sums_are_faster, max(lengths, default=0)


@pytest.mark.parametrize("rate", [2.5e5, 2.5e6, 1e8], ids=["2 Mbit/s", "20 Mbit/s", "800 Mbit/s"])
@pytest.mark.parametrize("buffer", [0, 10**6, 10**8], ids=["no buffer", "1 MB", "all in the buffer"])
def test_a_buffer_that_takes_a_short_message_whole_does_not_hide_that_permutations_wait(rate, buffer, monkeypatch):
    line, by_sums, longest = choice(monkeypatch, 4 * 10**6, rate, buffer)
    assert "swap by sums" in str(line)
    assert by_sums
    assert longest <= 4 * 10**6


def test_the_forms_are_compared_by_what_the_link_carries_in_two_seconds(monkeypatch):
    lines, _, longest = zip(*(choice(monkeypatch, 10**9, rate, 0) for rate in (1e5, 1e6, 1e9)), strict=True)
    assert longest == (2**19, pytest.approx(10**6, rel=0.05), 2**24)
    assert lines[1] == "pairs swap by sums: 1 MB take 2 s by a permutation, 1 s by a sum"


@pytest.mark.parametrize("num_bytes", [10**5, 10**8])
def test_permutations_are_chosen_where_they_are_clearly_faster(num_bytes, monkeypatch):
    line, by_sums, _ = choice(monkeypatch, num_bytes, 1e9, 0, is_slow=False)
    assert "swap by permutations" in str(line)
    assert by_sums is False


@pytest.mark.parametrize(
    ("platforms", "num_bytes"),
    [
        (("cpu", "cpu"), 2**16),  # small messages go by permutations anyway
        (("cpu",), 2**20),  # one process
        (("cuda", "cuda"), 2**20),
    ],
)
def test_nothing_is_measured_where_there_is_nothing_to_choose(platforms, num_bytes, monkeypatch):
    assert choice(monkeypatch, num_bytes, 2.5e6, 0, platforms=platforms) == (None, None, 0)


def test_a_mean_of_many_arrays_is_one_message(monkeypatch):
    tree = {str(i): np.random.default_rng(i).normal(size=(8, 3, i + 1)).astype(np.float32) for i in range(12)}
    program = over_devices(lambda x: all_mean(x, AXES), 8)
    found = collectives_of(program, (tree,), {"replica": 8})
    assert [(one.operation, one.bytes) for one in found] == [("psum", 4 * 3 * sum(range(1, 13)))]
    for name, mean in program(tree).items():
        np.testing.assert_allclose(mean, np.broadcast_to(tree[name].mean(axis=0), mean.shape), atol=1e-6)
