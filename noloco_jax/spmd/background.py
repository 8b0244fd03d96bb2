"""Outer steps whose exchange overlaps with training: it runs on the hosts' CPU devices, over JAX's own collectives.

The devices take the solo step and continue training. Messages are copied to CPU devices of the same processes, which
mirror the devices of the mesh. The exchange there is the same program with the same wire formats, so its results are
the same. Its corrections are copied back when they are due. No program on the devices contains a collective between
replicas, so no replica waits for a partner before the correction from it is due.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from noloco_jax.config import TrainConfig
from noloco_jax.errors import UserError
from noloco_jax.methods import has_delay
from noloco_jax.outer.rule import Arrived, Outgoing
from noloco_jax.spmd import sharding
from noloco_jax.spmd.offload import from_rest
from noloco_jax.spmd.programs import Programs, build_outer, outer_axes, over_mesh
from noloco_jax.spmd.sharding import SLOT

PyTree = Any


def is_in_background(config: TrainConfig, mesh: Mesh) -> bool:
    """Return True if exchanges run on the hosts: they have a delay, and replicas lie on several devices."""
    return has_delay(config) and mesh.shape["replica"] > 1


def training_devices(config: TrainConfig, devices: list) -> list:
    """Return the devices to train on, without the CPU devices that `host_mesh` needs for exchanges."""
    if not has_delay(config) or config.mesh.replica == 1 or len(devices) == 1 or devices[0].platform != "cpu":
        return devices
    by_process: dict[int, list] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    if min(map(len, by_process.values())) < 2:
        raise UserError(
            f"outer.delay={config.outer.delay} exchanges on CPU devices beside those that train, and a process has "
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
    """The programs of an outer step in three parts; the first and the last donate their arguments.

    Attributes:
      solo: (params, outer at rest) -> (params, outer at rest, Outgoing), on the run's devices.
      exchange: (Outgoing, number of the outer step) -> Arrived, on the hosts.
      store: (params, outer at rest, Arrived, number) -> (params, outer at rest), on the run's devices:
        `Programs.correct_step` applies the stored correction.
      outgoing: shapes and shardings of an Outgoing on the run's devices.
      arriving: shapes and shardings of an Arrived there.
      hosts: the mesh of the exchange.
    """

    solo: Callable[..., Any]
    exchange: Callable[..., Any]
    store: Callable[..., Any]
    outgoing: Outgoing
    arriving: Arrived
    hosts: Mesh


def build_background(config: TrainConfig, programs: Programs, hosts: Mesh) -> BackgroundPrograms:
    """Build the programs of a run whose outer steps have a delay; they are compiled at their first call.

    Args:
      config: the run.
      programs: the run's other programs.
      hosts: see `host_mesh`.
    """
    outer, mesh = build_outer(config), programs.mesh
    params, _, state = programs.state
    assert outer is not None and state is not None
    specs, state_specs = (jax.tree.map(lambda x: x.sharding.spec, tree) for tree in (params, state))
    windows = state_specs.windows
    outgoing_specs = Outgoing(specs, None if windows is None else specs, windows)
    axes = outer_axes(outer)
    store_slots = jax.vmap(outer.steps.store, in_axes=(axes, 0, None), out_axes=axes, axis_name=SLOT)
    solo = over_mesh(
        mesh,
        jax.vmap(outer.solo, in_axes=(0, axes), out_axes=(0, axes, 0), axis_name=SLOT),
        in_specs=(specs, state_specs),
        out_specs=(specs, state_specs, outgoing_specs),
        out_shardings=sharding.shardings(mesh, (specs, state_specs, outgoing_specs)),
        donate=(0, 1),
    )
    exchange = over_mesh(
        hosts,
        jax.vmap(outer.steps.exchanged, in_axes=(0, None), axis_name=SLOT),
        in_specs=(outgoing_specs, P()),
        out_specs=Arrived(specs, windows),
        out_shardings=sharding.shardings(hosts, Arrived(specs, windows)),
    )
    store = over_mesh(
        mesh,
        lambda params, state, arrived, number: (params, store_slots(state, arrived, number)),
        in_specs=(specs, state_specs, Arrived(specs, windows), P()),
        out_specs=(specs, state_specs),
        out_shardings=sharding.shardings(mesh, (specs, state_specs)),
        donate=(0, 1),
    )
    _, _, outgoing = jax.eval_shape(solo, params, state)
    outgoing = _placed(outgoing, mesh, outgoing_specs)
    return BackgroundPrograms(solo, exchange, store, outgoing, Arrived(outgoing.message, outgoing.windows), hosts)


def _placed(shapes: PyTree, mesh: Mesh, specs: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), shapes, specs
    )


def background_arguments(background: BackgroundPrograms, programs: Programs) -> dict[str, tuple[Any, ...]]:
    """Return the shapes and shardings of each program's arguments, by its name."""
    params, _, outer = programs.state
    number, outgoing = jax.ShapeDtypeStruct((), jnp.int32), background.outgoing
    on_hosts = _placed(outgoing, background.hosts, jax.tree.map(lambda x: x.sharding.spec, outgoing))
    return {
        "solo": (params, outer),
        "exchange": (on_hosts, number),
        "store": (params, outer, background.arriving, number),
    }


def compile_background(background: BackgroundPrograms, programs: Programs) -> BackgroundPrograms:
    """Compile the programs for the run's shapes; the outer state they take and return is at rest."""
    arguments = background_arguments(background, programs)
    compiled = {name: getattr(background, name).lower(*shapes).compile() for name, shapes in arguments.items()}
    solo, store = (from_rest(compiled[name], programs) for name in ("solo", "store"))
    return replace(background, solo=solo, store=store, exchange=compiled["exchange"])


class HostExchange:
    """Exchanges in flight over the hosts, dispatched by one thread in the order of their outer steps.

    Every process begins the same exchanges in the same order. Several may be in flight at once.

    Args:
      background: compiled.
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
        """Exchange what the solo step of outer step `number` sends, as soon as it is computed."""
        self._under_way[number] = self._thread.submit(self._exchange, outgoing, np.int32(number))

    def take(self, number: int) -> Arrived:
        """Return what the exchange gave of outer step `number`, on the run's devices, once it is dispatched."""
        return self._on_devices(self._under_way.pop(number).result(), self._background.arriving)

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
