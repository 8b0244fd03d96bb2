"""Checks and files of an island before it trains."""

from dataclasses import replace

import numpy as np
import pytest

from noloco_jax.config import TrainConfig, from_dict
from noloco_jax.data import load_tokenizer
from noloco_jax.errors import UserError
from noloco_jax.island.membership import Membership, _identity
from noloco_jax.islands.agent import Agent
from noloco_jax.islands.log import IslandLog
from noloco_jax.islands.protocol.members import OPEN, Entry, Members
from noloco_jax.islands.roster import Address, Island, Roster
from noloco_jax.islands.start import begin, incarnation_of, write_incarnation
from support.data_makers import train_stream
from support.training_islands import NAMES, World, small


def test_an_island_of_another_configuration_is_refused_before_it_compiles(world, tmp_path):
    world.begin(tmp_path)
    agents = [world.join(name)[0] for name in NAMES[:2]]
    other = World.__new__(World)
    other.__dict__.update(world.__dict__, config=small(lr=0.5))
    try:
        with pytest.raises(
            UserError, match=r"2 of 3 islands refuse rome; .* outer.lr: 0.5 here, .* at (berlin|paris): give"
        ):
            other.join("rome")
    finally:
        for agent in agents:
            agent.close()


@pytest.mark.parametrize("shuffle_buffer", [1, 100])
def test_new_members_that_read_the_same_data_are_warned_of(shuffle_buffer, tmp_path):
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text("".join(f"line {line} of file {number}\n" for line in range(40)))
    data = {"kind": "text", "path": str(tmp_path), "tokenizer": "byte", "shuffle_buffer": shuffle_buffer}
    config = from_dict({"num_replicas": 2, "data": {**data, "sequence_length": 64, "num_workers": 0}})
    roster = Roster("test", tuple(Island(name, Address("127.0.0.1", 1)) for name in NAMES[:2]))
    entries = [Entry(id, NAMES[id], "127.0.0.1:1", 0, OPEN, 0, version=1) for id in (2, 3)]
    members = Members(roster.names, lambda entry: True, entries)
    first = []
    for id in range(4):
        stream = train_stream(config.data, load_tokenizer("byte"), replica=id, num_replicas=2, seed=0)
        first.append(next(stream)["input_ids"])
        stream.close()
    warned = [Membership(roster, name, None, members=members).warning(config) is not None for name in NAMES]
    assert warned == [False, False, *[np.array_equal(first[2], first[3])] * 2]
    assert np.array_equal(first[2], first[3]) is (shuffle_buffer == 1)


def test_fields_at_their_defaults_are_left_out_of_the_identity(world):
    """A field that only a newer version has makes no difference while it has its default; once set, it is named."""
    roster = Roster("test", tuple(Island(name, Address("127.0.0.1", 1)) for name in NAMES))
    default, other = (
        _identity(Membership(roster, "paris", None), replace(world.config, seed=seed), world.programs, None)
        for seed in (TrainConfig.seed, 5)
    )
    assert "seed" not in default.config and other.config["seed"] == "5"
    assert default.config["outer.sync_every"] == "2"
    assert default.difference(other, "rome") == "seed: the default here, 5 at rome"


def test_an_island_counts_as_begun_only_once_it_may_train(world, tmp_path):
    """An island killed while it compiles has no weights to lose, and at its next start waits for no peer's weights."""
    world.begin(tmp_path)
    agent = world.open(Membership(world.roster, "paris", None))
    assert not incarnation_of(tmp_path / "paris")[1]
    assert begin(agent, tmp_path / "paris", lambda: False)
    assert incarnation_of(tmp_path / "paris")[1]
    agent.close()


def test_totals_of_earlier_starts_are_restored_when_the_agent_opens(world, tmp_path):
    """A restarted island's counters in /metrics must not drop between its first answer and its first step."""
    world.begin(tmp_path)
    IslandLog(tmp_path / "paris", "paris").start(0, 0.0)
    IslandLog(tmp_path / "paris", "paris").round(0, 10, 0.5, 1.0)
    first: list[dict[str, float]] = []
    opened = Agent.open

    def open_and_look(agent: Agent) -> None:
        opened(agent)
        first.append(agent.recent.totals)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agent, "open", open_and_look)
        world.open(Membership(world.roster, "paris", None)).close()
    assert first[0]["starts"] == 1 and first[0]["rounds"] == 1


def test_the_incarnation_increases_with_every_start(tmp_path):
    first, began = incarnation_of(tmp_path)
    write_incarnation(tmp_path, first)
    second, again = incarnation_of(tmp_path)
    assert second > first and (began, again) == (False, True)
