"""Islands of one configuration that train over Flight on loopback, in threads of one process, compiled once."""

import copy
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from noloco_jax.config import TrainConfig, from_dict
from noloco_jax.island.membership import Membership
from noloco_jax.islands.agent import Agent
from noloco_jax.islands.partners import partner_in
from noloco_jax.islands.payload import Codec
from noloco_jax.islands.protocol.members import Members
from noloco_jax.islands.start import begin
from noloco_jax.islands.steps import IslandSteps
from noloco_jax.spmd.batches import place_batch
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, TrainState, build_programs
from noloco_jax.spmd.solo import SoloPrograms, build_solo
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
    """Islands of one configuration, whose programs and codec are compiled once."""

    def __init__(self, config: TrainConfig, folder: Any):
        self.config = config
        self.begin(folder)
        self.own = Membership(self.roster, NAMES[0], None).own(config)
        self.programs: Programs = build_programs(self.own, make_mesh(self.own, jax.devices()[:1]))
        self.solo: SoloPrograms = build_solo(self.own, self.programs)
        codec = self.codec = Membership.codec(config, self.solo)

        class Member(Membership):
            """Member with a copy of the codec of all islands, which has no state and is compiled once."""

            @staticmethod
            def codec(config: TrainConfig, solo: SoloPrograms) -> Codec:
                del config, solo
                return copy.copy(codec)  # a test may replace a method of one island's

        self._member: type[Membership] = Member
        self.lines: list[str] = []

    def begin(self, folder: Any) -> None:
        """Other ports and folders, where no island has been before."""
        self.folder = folder
        self.roster = on_loopback(*NAMES)

    def open(self, member: Membership) -> Agent:
        arguments = (None, self.folder / member.name, lambda: False, self.lines.append)
        agent = member.open_agent(self.config, self.solo, self.programs, *arguments)
        assert agent is not None
        context = agent._protocol._context  # an island begins without those that a test does not start
        context.settings = dataclasses.replace(context.settings, awaits_absent=False)
        return agent

    def join(self, name: str, **options: Any) -> tuple[Agent, IslandSteps]:
        member = self._member(self.roster, name, None, **options)
        agent = self.open(member)
        steps = member.steps(self.own, agent, self.solo, self.programs)
        assert begin(agent, self.folder / name, lambda: False)
        return agent, steps

    def batch(self, step: int, replicas: range) -> dict[int, dict[str, np.ndarray]]:
        """Make the batch of some replicas, a function of step and replica alone."""
        size = (self.config.data.batch_size, self.config.data.sequence_length)
        numbers = [np.random.default_rng([step, replica]).integers(0, 259, (2, *size)) for replica in replicas]
        return {i: dict(zip(("input_ids", "labels"), x.astype(np.int32), strict=True)) for i, x in enumerate(numbers)}

    def inner(self, programs: Programs, state: TrainState, step: int, replicas: range) -> TrainState:
        batch = place_batch(self.batch(step, replicas), programs.batch)
        params, inner, _ = programs.inner_step(state.params, state.inner, batch, np.int32(step))
        return TrainState(params, inner, state.outer)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def round_of(first: str, second: str, world: World) -> int:
    """The first round in which the two meet."""
    partner = partner_in(Members(NAMES), first, world.config)
    return next(round for round in range(99) if partner(round) == second)


def train(world: World, island: IslandSteps, state: TrainState, step: int, replica: int) -> tuple[TrainState, int]:
    """A round."""
    for _ in range(world.config.outer.sync_every):
        step += 1
        state = world.inner(world.programs, state, step, range(replica, replica + 1))
    return island.take(state, step, 1), step
