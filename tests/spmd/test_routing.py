"""Routes of micro-batches between replicas' stages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from noloco_jax.optim.exchange.swap import NOWHERE
from noloco_jax.spmd.pipeline.over_devices import stage_routes
from noloco_jax.spmd.pipeline.routes import draw_routes, route_pool


@pytest.mark.parametrize("num_replicas", [2, 3, 4, 7, 16])
def test_every_replica_of_the_next_stage_is_equally_likely(num_replicas):
    pool = route_pool(num_replicas, 3, seed=5, routing="random")
    counts = np.zeros((2, num_replicas, num_replicas), int)
    for entry in pool:
        for boundary, destinations in enumerate(entry):
            assert sorted(destinations) == list(range(num_replicas))
            counts[boundary, np.arange(num_replicas), destinations] += 1
    assert (counts == len(pool) // num_replicas).all()


def test_each_of_100_replicas_sends_to_64_replicas_equally_often():
    pool = route_pool(100, 3, seed=5, routing="random")
    assert len(pool) == 64
    for boundary in (0, 1):
        assert (np.sort(pool[:, boundary], axis=-1) == np.arange(100)).all()
        assert all(len(set(pool[:, boundary, replica])) == 64 for replica in range(100))


def test_routes_are_those_of_a_fixed_hash():
    """Processes with different versions of NumPy must compile the same routes, so its streams may not enter."""
    assert route_pool(4, 3, seed=7, routing="random")[0].tolist() == [[2, 0, 3, 1], [2, 3, 1, 0]]


def test_fixed_routing_keeps_every_micro_batch_in_its_replica():
    assert (route_pool(5, 3, seed=0, routing="fixed") == np.arange(5)).all()


def test_draws_are_uniform_over_the_pool():
    draws = np.asarray(jax.vmap(lambda step: draw_routes(8, 5, 3, step))(jnp.arange(400))).ravel()
    counts = np.bincount(draws, minlength=8)
    chi_square = ((counts - len(draws) / 8) ** 2 / (len(draws) / 8)).sum()
    assert chi_square < 24.3  # the 0.999 quantile with 7 degrees of freedom


def test_draws_differ_between_steps_and_seeds():
    base = draw_routes(64, 8, 0, jnp.int32(1))
    assert (base != draw_routes(64, 8, 0, jnp.int32(2))).any()
    assert (base != draw_routes(64, 8, 1, jnp.int32(1))).any()


@pytest.mark.parametrize(("num_devices", "num_slots"), [(4, 1), (2, 2), (1, 4), (2, 3)])
def test_messages_deliver_every_stages_output_along_its_route(num_devices, num_slots):
    num_replicas, num_stages = num_devices * num_slots, 3
    pool = route_pool(num_replicas, num_stages, seed=2, routing="random")
    messages = stage_routes(pool, num_devices, num_slots)
    for entry, routes in enumerate(pool):
        arrived = {}
        pattern = messages.patterns[messages.pattern_of[entry]]
        assert all({*there[num_stages - 1 :: num_stages]} == {NOWHERE} for there, _ in pattern)  # the last stage
        start = 0
        incoming = {}
        for destinations, count in pattern:
            for device, there in enumerate(destinations):
                if there == NOWHERE:
                    continue
                for position in range(start, start + count):
                    incoming[there, position] = (device, messages.send[entry, device, position])
            start += count
        for device in range(num_devices * num_stages):
            replica_device, stage = divmod(device, num_stages)
            if stage == 0:
                continue
            for slot in range(num_slots):
                source_device, source_slot = incoming[device, messages.receive[entry, device, slot]]
                source_replica_device, source_stage = divmod(source_device, num_stages)
                assert source_stage == stage - 1
                source = source_replica_device * num_slots + source_slot
                arrived[source, stage] = replica_device * num_slots + slot
        for stage in range(1, num_stages):
            assert [arrived[i, stage] for i in range(num_replicas)] == list(routes[stage - 1])
