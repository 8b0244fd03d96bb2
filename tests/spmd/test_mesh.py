"""Meshes and the processes that hold their devices."""

from dataclasses import dataclass

import pytest

from noloco_jax.config import from_dict
from noloco_jax.errors import UserError
from noloco_jax.spmd.mesh import make_mesh


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int


def devices(number: int, a_process: int) -> list[Device]:
    return [Device(i, i // a_process) for i in range(number)]


@pytest.mark.parametrize(
    ("replicas", "mesh", "number", "a_process", "idle"),
    [
        (8, {}, 32, 8, "8 of 32 devices, and leaves 3 of the processes (such as 1)"),
        (3, {}, 2, 1, "1 of 2 devices, and leaves 1 of the processes (such as 1)"),
        (2, {"fsdp": 2}, 6, 2, "4 of 6 devices, and leaves 1 of the processes (such as 2)"),
    ],
)
def test_a_mesh_that_leaves_a_process_without_a_device_is_refused(replicas, mesh, number, a_process, idle):
    config = from_dict({"num_replicas": replicas, "mesh": mesh})
    with pytest.raises(UserError) as refused:
        make_mesh(config, devices(number, a_process))
    assert idle in str(refused.value)


def test_a_process_may_have_devices_to_spare():
    mesh = make_mesh(from_dict({"num_replicas": 3}), devices(4, 4))
    assert [device.id for device in mesh.devices.flat] == [0, 1, 2]


def test_fragments_that_do_not_divide_the_sharded_hidden_size_are_refused():
    fields = {"num_replicas": 2, "mesh": {"replica": 2, "fsdp": -1}, "data": {"batch_size": 4}}
    config = from_dict(
        fields | {"model": {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 2}, "outer": {"fragments": 32}}
    )
    with pytest.raises(UserError, match=r"outer\.fragments=32 does not divide the weight .* 2 parts of 16"):
        make_mesh(config, devices(4, 4))
    assert make_mesh(config, devices(2, 2)).shape["fsdp"] == 1
