"""Start of an island: its incarnation, its agent among the peers, and the decision to train."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from noloco_jax.cluster.processes import OneProcess, Processes
from noloco_jax.files import write_whole
from noloco_jax.islands.agent import Agent
from noloco_jax.islands.entries import MEMBERS_FILE, dials_of, known_roster, write_members
from noloco_jax.islands.frames import ArraySpec
from noloco_jax.islands.keys import Credentials
from noloco_jax.islands.log import earlier_events
from noloco_jax.islands.payload import Codec
from noloco_jax.islands.protocol.context import STARTS_APART, Settings
from noloco_jax.islands.protocol.island import Island, Journal
from noloco_jax.islands.protocol.members import Members
from noloco_jax.islands.protocol.messages import Identity
from noloco_jax.islands.query import check_alone
from noloco_jax.islands.roster import Address, Roster
from noloco_jax.islands.snapshots import Snapshots
from noloco_jax.islands.state_shares import StateLayouts

ISLAND_FILE = "island.json"


def open_agent(
    roster: Roster,
    name: str,
    credentials: Credentials | None,
    identity: Identity,
    partner: Callable[[int], str | None],
    settings: Settings,
    journal: Journal | None,
    workdir: Path,
    codec: Codec,
    states: StateLayouts,
    weights: Mapping[str, ArraySpec],
    about: Mapping[str, Any],
    is_stopping: Callable[[], bool],
    report: Callable[[str], None],
    members: Members,
    listen: Address | None,
    processes: Processes | None = None,
) -> Agent | None:
    """Join the peers, who may refuse the island; return None if told to stop meanwhile.

    Args:
      roster: the islands that the run began with.
      name: this island.
      credentials: its keys; None without TLS.
      identity: values that must agree.
      partner: outer step -> the island to exchange it with, or None.
      settings: the protocol's settings.
      journal: of the checkpoint to resume from; None: a new run.
      workdir: the island's folder.
      codec: the codec of messages.
      states: layouts of a state that is sent.
      weights: specs of weights sent for merging.
      about: description of the island's weights, beside its identity.
      is_stopping: returns True once told to stop.
      report: called with lines for people.
      members: the members as they are known at the start, which the workdir keeps.
      listen: the address to listen at; None: see `Server`.
      processes: the island's processes, of which the first calls this, and the others `follow`.

    Raises `UserError` if its name or address is in use, or most of the others refuse it.
    """
    check_alone(known_roster(roster, members, 0), name, credentials)
    incarnation, began_before = incarnation_of(workdir)
    others = [other for other in roster.names if other != name]
    settings = dataclasses.replace(settings, shares=states.of(settings.whole_state).count)
    rules = settings, journal, began_before, members, dials_of(roster, members)
    protocol = Island(name, others, identity, partner, incarnation, *rules)
    file = workdir / MEMBERS_FILE
    if members.entries:
        write_members(file, roster, members.entries)
    agent = Agent(
        roster, name, credentials, protocol, settings, codec, states, report, Snapshots(weights), about, file, listen
    )
    for event in earlier_events(workdir):  # who watches sees totals that never fall
        agent.recent.add(event)
    try:
        agent.open()
        if _until(agent.admitted, is_stopping, processes or OneProcess()):
            return agent
    except BaseException:
        agent.close()
        raise
    agent.close()
    return None


def begin(agent: Agent, workdir: Path, is_stopping: Callable[[], bool], processes: Processes | None = None) -> bool:
    """Wait for the decision to train: from the own weights, or from a peer's, which come with the first step.

    Islands that start at the same time begin together. Returns False if told to stop meanwhile.
    """
    agent.ready()
    begins = _until(agent.decided, is_stopping, processes or OneProcess())
    if begins:
        write_incarnation(workdir, agent.incarnation)
    return begins


def follow(is_stopping: Callable[[], bool], processes: Processes) -> bool:
    """Wait, in a process of the island without the agent, for what the first one waits for in `open_agent` or `begin`.

    Returns False if told to stop meanwhile.
    """
    return _until(lambda seconds: False, is_stopping, processes)  # the first process's answer is broadcast


def incarnation_of(workdir: Path) -> tuple[int, bool]:
    """Return an incarnation larger than that of every earlier start, and whether there was one.

    Milliseconds leave room for increments, and the clock still counts up where a workdir was lost with its disk.
    """
    path = workdir / ISLAND_FILE
    before = json.loads(path.read_text(encoding="utf-8"))["incarnation"] if path.exists() else 0
    return max(before + STARTS_APART, time.time_ns() // 1_000_000), before > 0


def write_incarnation(workdir: Path, incarnation: int) -> None:
    workdir.mkdir(parents=True, exist_ok=True)
    write_whole(workdir / ISLAND_FILE, json.dumps({"incarnation": incarnation}))


def _until(is_known: Callable[[float], bool], is_stopping: Callable[[], bool], processes: Processes) -> bool:
    while not processes.broadcast(lambda: is_known(0.2)):
        if is_stopping():
            return False
    return True
