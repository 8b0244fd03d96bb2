"""States of islands in words for people, also of those that do not answer. Needs no jax."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.roster import Member

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
