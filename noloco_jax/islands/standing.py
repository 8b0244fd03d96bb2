"""States of islands as watchers know them, in words and figures, also of those that do not answer. Needs no jax."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.peers import FAULTS, LINES, MAX_ROUND
from noloco_jax.islands.roster import Member, Roster

TRAINING, FINISHED, LEFT, REMOVED, AWAY = "training", "finished", "left", "removed", "away"
_ANSWERING = {
    pb.Status.STARTING: "starting",
    pb.Status.READY: "waiting to begin",
    pb.Status.TRAINING: TRAINING,
    pb.Status.FINISHED: FINISHED,
    pb.Status.LEAVING: "leaving",
    pb.Status.MERGED: FINISHED,
    pb.Status.GONE: "leaving",
}
_ENDED = {
    **dict.fromkeys((pb.Status.FINISHED, pb.Status.MERGED), FINISHED),
    **dict.fromkeys((pb.Status.LEAVING, pb.Status.GONE), LEFT),
}
NOT_ASKED = "not asked yet"
_LONGEST, _FIGURES = 300, 16  # characters of a line, and figures of an island: more are not honest
STARTED = (pb.Status.TRAINING, *_ENDED)  # phases in which an island's round is its own, and not one before a restart


def standing(member: Member, answer: pb.Status | None, last: Any, is_over: bool) -> str:
    """Return an island's state.

    Args:
      member: its row in the roster.
      answer: its status; None: it does not answer.
      last: the phase that it told last, itself or to others; None: unknown.
      is_over: True if its membership has ended in the round of most islands.

    Returns:
      "starting", "waiting to begin", "training" or "leaving" while it answers, "finished" and "removed" then and
      afterwards, "left" after it was told to stop or has ended for good, and "away" if it ended or is cut off without a
      word.
    """
    if member.until_round is not None and (is_over or (answer and member.until_round <= answer.round + 1)):
        return REMOVED
    if answer is not None:
        return _ANSWERING.get(answer.phase, AWAY)
    return _ENDED.get(last, AWAY)


def is_complete(states: Iterable[str]) -> bool:
    """Return whether a run is complete: all of its members have finished."""
    return {state for state in states if state != REMOVED} == {FINISHED}


def summary(states: Iterable[str]) -> str:
    """Return a run's state in a line, such as "3 of 4 islands train, 1 away"."""
    counts = Counter(states)
    removed = f", {counts[REMOVED]} removed" if counts[REMOVED] else ""
    total = counts.total() - counts.pop(REMOVED, 0)
    if is_complete(counts):
        return f"complete: {total} of {total} islands have finished{removed}"
    if counts.keys() == {AWAY}:
        return f"none of {total} islands answers: the run is over, or cannot be reached{removed}"
    if not counts.keys() - {FINISHED, LEFT, AWAY} and counts[FINISHED]:
        first = f"over: {counts.pop(FINISHED)} of {total} islands have finished"
    else:
        first = f"{counts.pop(TRAINING, 0)} of {total} islands train"
    return first + "".join(f", {number} {state}" for state, number in sorted(counts.items())) + removed


def present(roster: Roster, statuses: Iterable[pb.Status]) -> list[Member]:
    """Return the members whose membership has not ended in the round of most islands; without a status, in any."""
    rounds = [status.round for status in statuses]
    round = statistics.median_low(rounds) if rounds else MAX_ROUND
    return [one for one in roster.members if not roster.is_over(one.name, round + 1)]


@dataclass
class Watched:
    """Last known state of one island.

    Attributes:
      status: its last status.
      fault: the reason for which it does not answer now; empty: it does.
      answered: time of the last status, by the monotonic clock.
      told: the phase that others have last heard of it, since it does not answer; None: unknown.
    """

    status: pb.Status | None = None
    fault: str = NOT_ASKED
    answered: float = -math.inf
    told: Any = None

    def take(self, status: pb.Status, now: float) -> None:
        self.status, self.fault, self.answered, self.told = status, "", now, None

    @property
    def answer(self) -> pb.Status | None:
        """Its status, while it answers."""
        return None if self.fault else self.status

    @property
    def last(self) -> Any:
        """The phase that is known last; None: none is."""
        return self.told if self.told is not None else self.status and self.status.phase

    def sample(self) -> tuple[float | None, float | None]:
        """Return round and loss for a chart; None for each that it does not tell.

        An island that has restarted has no round until it trains: it may yet catch up.
        """
        if (status := self.answer) is None or status.phase not in STARTED:
            return None, None
        return status.round + 1, _finite(status.figures).get("loss")

    def to_json(self, state: str, version: int, now: float) -> dict[str, Any]:
        """Return what a page shows; `state` is the island's, `version` that of the newest roster."""
        one = self.status
        shown: dict[str, Any] = {"state": state, "answers": not self.fault}
        if state == AWAY:
            shown["away"] = self.fault
        if one is None:
            return shown
        known = {
            "seconds": now - self.answered,
            "due": one.due,
            "committed": one.committed,
            "one_sided": one.one_sided,
            "steps_late": one.steps_late if math.isfinite(one.steps_late) else None,
            "participation": one.committed / one.due if one.due else None,
            "partner": one.partner[:_LONGEST],
            "members": one.num_members,
            "roster": one.roster_version,
            "is_behind": is_behind(one.roster_version, version),
            "figures": _finite(one.figures),
            "peers": [{"name": peer.name, "fault": peer.fault[:_LONGEST]} for peer in one.peers[:FAULTS]],
            "notices": [line[:_LONGEST] for line in one.notices[-LINES:]],
        }
        if one.phase in STARTED:
            known |= {"round": one.round + 1, "step": one.step, "rounds": one.num_rounds or None}
        return shown | known


def _finite(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures that JSON can hold."""
    few = itertools.islice(figures.items(), _FIGURES)
    return {name[:_LONGEST]: value for name, value in few if math.isfinite(value)}


def is_behind(version: int, newest: int) -> bool:
    """Return whether an island's roster is older than the newest; version 1 is the file, version 0, signed."""
    return max(version, 1) < newest


def states_of(roster: Roster, islands: Mapping[str, Watched]) -> dict[str, str]:
    """Return the state of every member, in the roster's order: see `standing`."""
    statuses = [one.status for one in islands.values() if one.status is not None]
    there = {member.name for member in present(roster, statuses)}
    states = {}
    for member in roster.members:
        one = islands.get(member.name) or Watched()
        state = standing(member, one.answer, one.last, member.name not in there)
        states[member.name] = one.fault if state == AWAY and one.fault == NOT_ASKED else state
    return states
