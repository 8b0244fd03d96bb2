"""Outer steps of one configuration in every mode of use: an own loop, one program, islands.

In the place of inner steps, noise moves every replica's weights: the same in every mode, so that only outer steps can
tell modes apart.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noloco_jax.config import DataConfig, MeshConfig, ModelConfig, OuterConfig, TrainConfig
from noloco_jax.model.architecture import init_params
from noloco_jax.optim.methods import METHODS
from noloco_jax.spmd.background import compile_background, host_mesh, is_in_background
from noloco_jax.spmd.compile import compile_programs
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, TrainState, build_programs, shardings_of
from noloco_jax.spmd.sharding import fragments_of
from noloco_jax.train.sync import BackgroundSync, CollectiveSync, Sync
from support import tiny_model
from support.at_once import side_by_side, wait_for_exchanges
from support.initial import initial_state
from support.layouts import some_devices
from support.training_islands import NAMES, World

PyTree = Any


CONFIG = TrainConfig(
    num_replicas=4,
    num_steps=9,
    model=ModelConfig(kind=tiny_model.KIND, hidden_size=32, intermediate_size=64, num_layers=2, vocab_size=64),
    outer=OuterConfig(sync_every=2),
    data=DataConfig(sequence_length=16, batch_size=2),
)


def own_loop(config: TrainConfig) -> PyTree:
    """Replicas as slots of one device; the outer optimizer is an Optax transform that sees the noise as updates."""
    make_outer, schedule = METHODS[config.method].outer_optimizer, config.schedule
    assert schedule is not None
    outer = make_outer(
        config.outer,
        config.num_replicas,
        config.seed,
        "replica",
        fragments_of(config.model, config.outer.fragments),
    )
    update = jax.jit(jax.vmap(outer.update, axis_name="replica"))
    params: Any = init_params(config.model, jax.random.key(0))
    params = jax.tree.map(lambda x: np.repeat(np.asarray(x)[None], config.num_replicas, 0), params)
    state: Any = jax.vmap(outer.init)(params)
    for step in range(1, config.num_steps + 1):
        updates, state = update(_noise(params, step), state, params)
        params = jax.tree.map(np.add, params, updates)
    return _compared(config, TrainState(params, (), state))


def one_program(config: TrainConfig, mesh: MeshConfig) -> PyTree:
    """Replicas of a program over the devices of a mesh; with a delay their exchanges run over the hosts."""
    config = dataclasses.replace(config, mesh=mesh)
    programs = programs_of(config)
    return _compared(config, trained(config, programs, syncs_of(config, programs), restart_at=5))


def islands(config: TrainConfig, folder: Path) -> PyTree:
    """Islands in threads of one process; each waits for its exchanges, so that they enter at once."""
    world, schedule = World(config, folder), config.schedule
    assert schedule is not None
    final: dict[int, TrainState] = {}

    def train(replica: int) -> None:
        link, island = world.join(NAMES[replica])
        wait_for_exchanges(island)
        state = jax.tree.map(jnp.copy, initial_state(world.programs))  # each array is donated by itself
        for step in range(1, config.num_steps + 1):
            state = pushed(config, state, step, slice(replica, replica + 1))
            state = island.outer_step(state, step, schedule.due(step))
        outcomes, status = link.take_outcomes(), link.status()
        assert status.committed == status.due == schedule.total(config.num_steps)
        assert {one.outcome for one in outcomes} == {"met"}
        link.close()
        final[replica] = jax.device_get(state)

    side_by_side(*[lambda i=i: train(i) for i in range(config.num_replicas)])
    together = [_compared(config, final[replica]) for replica in range(config.num_replicas)]
    return jax.tree.map(lambda *rows: np.concatenate(rows), *together)


def programs_of(config: TrainConfig) -> Programs:
    """Build the programs of a configuration's mesh, and compile those of its outer steps."""
    sizes = [getattr(config.mesh, axis) for axis in ("replica", "stage", "fsdp", "tensor")]
    mesh = make_mesh(config.mesh, config.num_replicas, some_devices(math.prod(sizes)))
    exchanging = () if is_in_background(config.delay, mesh) else ("outer_step",)
    with jax.numpy_rank_promotion("allow"):
        needed = (*exchanging, "correct_step")
        return compile_programs(build_programs(config, mesh), offload=config.outer.offload, only=needed)


def syncs_of(config: TrainConfig, programs: Programs) -> Callable[[], CollectiveSync]:
    """Return a function that makes the sync of each start of a run, from programs that are compiled once."""
    if not is_in_background(config.delay, programs.mesh):
        return partial(CollectiveSync, config, programs)
    background = compile_background(programs, host_mesh(programs.mesh))
    return partial(BackgroundSync, config, programs, background)


def trained(config: TrainConfig, programs: Programs, start: Callable[[], Sync], restart_at: int) -> TrainState:
    """Return the state after all steps of a run that is saved after step `restart_at`, ends, and starts again."""
    sync, state = start(), initial_state(programs)
    for step in range(1, config.num_steps + 1):
        state, _ = sync.after_step(pushed(config, state, step), step, 1)
        if step == restart_at:
            state, _ = sync.settle(state)
            sync.close(state, False)
            sync = start()
    state = sync.settle(state)[0]
    sync.close(state, True)
    return state


def pushed(config: TrainConfig, state: TrainState, step: int, rows: slice = slice(None)) -> TrainState:
    """Return the state after an inner step by noise, of some of the replicas."""
    params = jax.tree.map(lambda x, noise: np.asarray(x) + noise, state.params, _noise(state.params, step, rows))
    return state._replace(params=jax.device_put(params, shardings_of(state.params)))


def _noise(tree: PyTree, step: int, rows: slice = slice(None)) -> PyTree:
    """Draw float32 numbers for a tree of arrays of some of the replicas."""
    leaves, structure = jax.tree.flatten(tree)

    def one(number: int, shape: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([step, number])
        return 4e-3 * rng.normal(size=(CONFIG.num_replicas, *shape)).astype(np.float32)[rows]

    return structure.unflatten([one(number, x.shape[1:]) for number, x in enumerate(leaves)])


def _compared(config: TrainConfig, state: TrainState) -> PyTree:
    """Return what is equal in all modes: weights and the rule's state of a replica."""
    assert state.outer is not None
    kept = {"params": state.params, "rule": [x for x in jax.tree.leaves(state.outer.rule) if x.ndim > 1]}
    return jax.tree.map(np.asarray, jax.device_get(kept))
