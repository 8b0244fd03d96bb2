"""Meshes and the processes that hold their devices."""

from dataclasses import dataclass

import pytest

from noloco_jax.config import MeshConfig, ModelConfig
from noloco_jax.errors import UserError
from noloco_jax.spmd.mesh import check_layout, make_mesh, mesh_shape


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
    with pytest.raises(UserError) as refused:
        make_mesh(MeshConfig(**mesh), replicas, devices(number, a_process))
    assert idle in str(refused.value)


def test_a_process_may_have_devices_to_spare():
    mesh = make_mesh(MeshConfig(), 3, devices(4, 4))
    assert [device.id for device in mesh.devices.flat] == [0, 1, 2]


def test_fragments_that_do_not_divide_the_sharded_hidden_size_are_refused():
    model, sizes = ModelConfig(hidden_size=32, num_heads=2, num_kv_heads=2), MeshConfig(replica=2, fsdp=-1)
    with pytest.raises(UserError, match=r"outer\.fragments=32 does not divide the weight .* 2 parts of 16"):
        check_layout(model, 4, 1, 32, mesh_shape(sizes, 2, 4))
    check_layout(model, 4, 1, 32, mesh_shape(sizes, 2, 2))
