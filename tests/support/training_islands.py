"""Islands of one configuration that train over loopback, in threads of one process."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from noloco_jax.cluster.processes import OneProcess
from noloco_jax.config import TrainConfig, from_dict
from noloco_jax.islands import start
from noloco_jax.islands.membership import Membership, write_incarnation
from noloco_jax.islands.network import NetworkThread
from noloco_jax.islands.programs import build_local
from noloco_jax.islands.run import island_steps, link_plan
from noloco_jax.islands.steps import IslandSteps
from noloco_jax.spmd.batches import place_batch
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, TrainState, build_programs
from support import tiny_model
from support.rosters import on_loopback

NAMES = ("paris", "berlin", "rome", "oslo")


def small(**outer: Any) -> TrainConfig:
    return from_dict(
        {
            "num_replicas": 4,
            "num_steps": 20,
            "model": {"kind": tiny_model.KIND, "hidden_size": 16, "intermediate_size": 32, "num_layers": 1},
            "inner": {"lr": 1e-2, "warmup_steps": 2, "eps": 1e-4},
            "outer": {"sync_every": 2, **outer},
            "data": {"sequence_length": 8, "batch_size": 2},
        }
    )


class World:
    """Islands of one configuration, whose programs are built once."""

    def __init__(self, config: TrainConfig, folder: Path):
        self.config, self.folder = config, folder
        self.roster = on_loopback(*NAMES[: config.num_replicas])
        self.own = Membership(self.roster, NAMES[0], None).own(config)
        self.programs: Programs = build_programs(self.own, make_mesh(self.own.mesh, 1, jax.devices()[:1]))
        self.lines: list[str] = []

    def join(self, name: str, **options: Any) -> tuple[NetworkThread, IslandSteps]:
        """Start an island as a run does, from no checkpoint; the others are waited for."""
        member, local = Membership(self.roster, name, None, **options), build_local(self.own, self.programs)
        plan = link_plan(self.config, member, local, self.programs, self.folder / name, None, None)
        link = NetworkThread(plan, self.lines.append)
        link.open().result()
        steps = island_steps(self.own, member, link, local, self.programs, OneProcess())
        link.begin().result()
        write_incarnation(self.folder / name, plan.incarnation)
        return link, steps

    def batch(self, step: int, replicas: range) -> dict[int, dict[str, np.ndarray]]:
        """Make the batch of some replicas, a function of step and replica alone."""
        size = (self.config.data.batch_size, self.config.data.sequence_length)
        numbers = [np.random.default_rng([step, replica]).integers(0, 259, (2, *size)) for replica in replicas]
        return {i: dict(zip(("input_ids", "labels"), x.astype(np.int32), strict=True)) for i, x in enumerate(numbers)}

    def inner(self, state: TrainState, step: int, replicas: range) -> TrainState:
        batch = place_batch(self.batch(step, replicas), self.programs.batch)
        params, inner, _ = self.programs.inner_step(state.params, state.inner, batch, np.int32(step))
        return TrainState(params, inner, state.outer)


def begin_without(monkeypatch: pytest.MonkeyPatch, *absent: str) -> None:
    """Let islands begin without these, which a test starts later or never."""
    waits_for = start._waits_for
    monkeypatch.setattr(start, "_waits_for", lambda *known: [name for name in waits_for(*known) if name not in absent])
