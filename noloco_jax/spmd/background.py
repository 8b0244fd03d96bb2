"""Outer steps whose exchange overlaps with training: it runs on the hosts' CPU devices, over JAX's own collectives.

The devices take the local step and continue training. Messages are copied to CPU devices of the same processes, which
mirror the devices of the mesh. The exchange there is the same program with the same wire formats, so its results are
the same. Its corrections are copied back when they are due. No program on the devices contains a collective between
replicas, so no replica waits for a partner before the correction from it is due.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from noloco_jax.config import MeshConfig
from noloco_jax.errors import UserError
from noloco_jax.optim.rule import Arrived, Outgoing
from noloco_jax.spmd.offload import from_host_memory
from noloco_jax.spmd.programs import Programs

PyTree = Any


def is_in_background(delay: int, mesh: Mesh) -> bool:
    """Return True if exchanges run on the hosts: they have a delay, and replicas lie on several devices."""
    return delay > 0 and mesh.shape["replica"] > 1


def training_devices(delay: int, sizes: MeshConfig, devices: list) -> list:
    """Return the devices to train on, without the CPU devices that `host_mesh` needs for exchanges with a delay."""
    if not delay or sizes.replica == 1 or len(devices) == 1 or devices[0].platform != "cpu":
        return devices
    by_process: dict[int, list] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    if min(map(len, by_process.values())) < 2:
        raise UserError(
            f"outer.delay={delay} exchanges on CPU devices beside those that train, and a process has "
            "one: leave JAX_NUM_CPU_DEVICES unset and xla_force_host_platform_device_count out of XLA_FLAGS, or make "
            "them at least 2"
        )
    return [device for own in by_process.values() for device in own[: len(own) // 2]]


def host_mesh(mesh: Mesh) -> Mesh:
    """Mirror a mesh on CPU devices: each device is mirrored by a CPU device of its process that does not train.

    Raises:
      UserError: if a process has too few CPU devices.
    """
    try:
        hosts = jax.devices("cpu")
    except RuntimeError:
        raise UserError(
            "outer.delay exchanges over the hosts, and JAX has no CPU devices: add cpu to JAX_PLATFORMS, as in cuda,cpu"
        ) from None
    taken = set(mesh.devices.flat)
    free: dict[int, list] = {}
    for host in hosts:
        if host not in taken:
            free.setdefault(host.process_index, []).append(host)
    mirrored = []
    for device in mesh.devices.flat:
        if not free.get(device.process_index):
            raise UserError(
                f"outer.delay exchanges over the hosts with a CPU device for each device, and process "
                f"{device.process_index} has too few: raise jax_num_cpu_devices (JAX_NUM_CPU_DEVICES)"
            )
        mirrored.append(free[device.process_index].pop(0))
    return Mesh(np.array(mirrored).reshape(mesh.devices.shape), mesh.axis_names, axis_types=mesh.axis_types)


@dataclass(frozen=True)
class BackgroundPrograms:
    """Compiled programs of an outer step in three parts, see `OuterPrograms`; the outer state they take is at rest.

    Attributes:
      local_step, store: on the run's devices; `Programs.correct_step` applies the stored correction.
      exchange: on the hosts.
      arrived: shapes and shardings of an Arrived on the run's devices.
      hosts: the mesh of the exchange.
    """

    local_step: Callable[..., Any]
    exchange: Callable[..., Any]
    store: Callable[..., Any]
    arrived: Arrived
    hosts: Mesh


def exchange_parts(programs: Programs, hosts: Mesh) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return the programs of an outer step whose exchange runs on `hosts`, with their arguments' shapes, by name."""
    outer = programs.outer
    assert outer is not None
    parts = {"local_step": outer.local_step, "exchange": outer.exchange(hosts), "store": outer.store}
    arguments = outer.arguments(hosts)
    return {name: (program, arguments[name]) for name, program in parts.items()}


def compile_background(programs: Programs, hosts: Mesh) -> BackgroundPrograms:
    """Compile the programs of outer steps whose exchange runs on `hosts`, see `host_mesh`."""
    assert programs.outer is not None
    parts = exchange_parts(programs, hosts)
    compiled = {name: program.lower(*arguments).compile() for name, (program, arguments) in parts.items()}
    local_step, store = (from_host_memory(compiled[name], programs) for name in ("local_step", "store"))
    return BackgroundPrograms(local_step, compiled["exchange"], store, programs.outer.arrived, hosts)


class HostExchange:
    """Exchanges in flight over the hosts, dispatched by one thread in the order of their outer steps.

    Every process begins the same exchanges in the same order. Several may be in flight at once.

    Args:
      background: its programs.
      mesh: the run's devices.
    """

    def __init__(self, background: BackgroundPrograms, mesh: Mesh):
        self._background = background
        pairs = list(zip(mesh.devices.flat, background.hosts.devices.flat, strict=True))
        self._host_of, self._device_of = dict(pairs), {host: device for device, host in pairs}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        self._under_way: dict[int, Future[Any]] = {}

    @property
    def under_way(self) -> list[int]:
        """Return the outer steps whose corrections have not been taken, in order."""
        return sorted(self._under_way)

    def begin(self, outgoing: Outgoing, number: int) -> None:
        """Exchange what the local step of outer step `number` sends, as soon as it is computed."""
        self._under_way[number] = self._thread.submit(self._exchange, outgoing, np.int32(number))

    def take(self, number: int) -> Arrived:
        """Return what the exchange gave of outer step `number`, on the run's devices, once it is dispatched."""
        return self._on_devices(self._under_way.pop(number).result(), self._background.arrived)

    def wait(self) -> None:
        """Wait for all exchanges in flight, so that every process launches what follows after them."""
        for begun in self._under_way.values():
            jax.block_until_ready(begun.result())

    def close(self) -> None:
        """End the thread after it has dispatched every exchange that was begun."""
        self._thread.shutdown()

    def _exchange(self, outgoing: Outgoing, number: np.int32) -> Any:
        return self._background.exchange(self._on_hosts(outgoing), number)

    def _on_hosts(self, tree: PyTree) -> PyTree:
        hosts = self._background.hosts
        return jax.tree.map(
            lambda x: _moved(x, NamedSharding(hosts, x.sharding.spec), self._host_of), jax.block_until_ready(tree)
        )

    def _on_devices(self, tree: PyTree, like: PyTree) -> PyTree:
        return jax.tree.map(lambda x, to: _moved(x, to.sharding, self._device_of), tree, like)


def _moved(x: jax.Array, sharding: NamedSharding, to: dict[Any, Any]) -> jax.Array:
    """Copy every shard of an array to the device that `to` maps the shard's device to."""
    parts = [jax.device_put(shard.data, SingleDeviceSharding(to[shard.device])) for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)
