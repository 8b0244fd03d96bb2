"""Batches that one process reads and shares with all devices of the replica."""

import math
from types import SimpleNamespace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from noloco_jax.spmd.batches import parts_of, place_parts, replicas_read_here, share_program, spans_processes
from noloco_jax.spmd.mesh import AXES, mesh_of
from noloco_jax.spmd.sharding import BATCH_SPEC

# (replica, stage, fsdp, tensor) and the number of replicas
LAYOUTS = [((1, 1, 2, 1), 1), ((2, 1, 2, 1), 4), ((2, 1, 2, 2), 2), ((1, 2, 2, 2), 1), ((4, 2, 1, 1), 4)]


def mesh_over(sizes: tuple[int, ...]) -> jax.sharding.Mesh:
    return mesh_of(dict(zip(AXES, sizes, strict=True)), jax.devices())


@pytest.mark.parametrize(("sizes", "num_replicas"), LAYOUTS)
def test_every_device_receives_its_own_rows_of_the_batch(sizes, num_replicas):
    mesh = mesh_over(sizes)
    sequences = jax.ShapeDtypeStruct((num_replicas, 4, 6), jnp.int32, sharding=NamedSharding(mesh, BATCH_SPEC))
    names = ("input_ids", "labels", "segment_ids")
    rng = np.random.default_rng(0)
    parts = parts_of(dict.fromkeys(names, sequences), mesh)
    share = share_program(mesh, names)
    assert replicas_read_here(mesh, num_replicas) == list(range(num_replicas))
    for _ in range(2):
        read = {i: {name: rng.integers(-100, 99, (4, 6), np.int32) for name in names} for i in range(num_replicas)}
        shared = share(place_parts(read, names, parts))
        for name in names:
            expected = np.stack([read[i][name] for i in range(num_replicas)])
            assert shared[name].sharding.is_equivalent_to(sequences.sharding, 3)
            assert len(shared[name].addressable_shards) == math.prod(sizes)
            for shard in shared[name].addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])


@pytest.mark.parametrize(
    ("sizes", "devices_per_process", "expected"),
    [
        ((4, 1, 2, 1), 8, False),
        ((4, 1, 2, 1), 2, False),
        ((4, 1, 2, 1), 1, True),
        ((2, 1, 2, 2), 2, True),
        ((2, 2, 1, 1), 3, True),  # the second replica spans two
        ((8, 1, 1, 1), 1, False),
    ],
)
def test_a_replica_spans_processes_when_its_devices_belong_to_several(sizes, devices_per_process, expected):
    owners = np.arange(math.prod(sizes)) // devices_per_process
    devices = np.array([SimpleNamespace(process_index=owner) for owner in owners.tolist()]).reshape(sizes)
    mesh = cast(jax.sharding.Mesh, SimpleNamespace(devices=devices, shape=dict(zip(AXES, sizes, strict=True))))
    assert spans_processes(mesh) == expected
    assert not spans_processes(mesh_over(sizes))
