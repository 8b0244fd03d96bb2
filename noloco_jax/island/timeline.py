"""Figures and timelines computed from islands' logs."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from noloco_jax.islands.log import History

_SILENT_INTERVALS = 10  # median round intervals of silence after which an island counts as dead


class Figures(NamedTuple):
    """Totals of an island over all of its starts.

    Attributes:
      rounds: rounds that the weights have behind them.
      met, due: committed exchanges, and messages that had a partner.
      steps_late: mean inner steps begun from a round's end until its exchange committed; None where the log has none.
      sent: bytes of messages that partners received.
      starts: number of processes.
      healings: states taken from donors.
      gave_way: seconds of pauses for slower islands.
      exposed: seconds that training stood still for exchanges besides.
      timed: seconds from each start, or end of a round, to the next one's end, where the log has these.
    """

    rounds: int
    met: int
    due: int
    steps_late: float | None
    sent: float
    starts: int
    healings: int
    gave_way: float
    exposed: float
    timed: float


class Life(NamedTuple):
    """Lifetime of one process of an island: start, last event, and whether it ended regularly."""

    start: float
    end: float
    in_order: bool


class Timeline(NamedTuple):
    """Row of an island in the picture; times in seconds since 1970.

    Attributes:
      name: the island's name.
      lives: its processes, in their order.
      rounds: times of round ends.
      alone: times of the ends of rounds whose exchange never committed.
      healings: (time, donor) of each state taken.
    """

    name: str
    lives: list[Life]
    rounds: list[float]
    alone: list[float]
    healings: list[tuple[float, str]]


class Link(NamedTuple):
    """Exchange between two islands, from the end of its round on the first to that on the second, sorted by name."""

    first: str
    first_time: float
    second: str
    second_time: float
    late: bool


def figures_of(history: History) -> Figures:
    """Compute the figures of an island's log."""
    outcomes = _of_kind(history, "exchange")
    steps = [event["steps_late"] for event in outcomes if event.get("steps_late") is not None]  # earlier logs lack it
    rounds = [event["round"] + 1 for event in history.events if event["event"] == "round" or _is_healing(event)]
    return Figures(
        rounds=rounds[-1] if rounds else 0,
        met=sum(event["outcome"] in ("met", "late") for event in outcomes),
        due=len(_of_kind(history, "round"))
        - sum(event["outcome"] == "alone" and not event["partner"] for event in outcomes),
        steps_late=statistics.fmean(steps) if steps else None,
        sent=sum(event["sent"] for event in outcomes),
        starts=len(_of_kind(history, "start")),
        healings=sum(map(_is_healing, outcomes)),
        gave_way=sum(event["gave_way"] for event in _of_kind(history, "round")),
        exposed=sum(event.get("exposed", 0.0) for event in _of_kind(history, "round")),
        timed=_timed(history),
    )


def timeline_of(history: History) -> Timeline:
    """Compute the row that is drawn for an island's log."""
    outcomes = _of_kind(history, "exchange")
    ticks = _Ticks(history)
    alone = [ticks.before(event["round"], event["time"]) for event in outcomes if _is_alone(event)]
    return Timeline(
        history.name,
        _lives(history),
        [event["time"] for event in _of_kind(history, "round")],
        [time for time in alone if time is not None],
        [(event["time"], event["partner"]) for event in outcomes if _is_healing(event)],
    )


def links_of(histories: Sequence[History]) -> list[Link]:
    """Return the exchanges between these islands, each once, whichever of the two logged it."""
    ticks = {history.name: _Ticks(history) for history in histories}
    found: dict[tuple[str, float, str, float], bool] = {}
    for history in histories:
        for event in _of_kind(history, "exchange"):
            if event["outcome"] not in ("met", "late") or event["partner"] not in ticks:
                continue
            first, second = sorted((history.name, event["partner"]))
            start, end = (ticks[name].before(event["round"], event["time"]) for name in (first, second))
            if start is not None and end is not None:
                key = first, start, second, end
                found[key] = found.get(key, False) or event["lag"] > 0
    return [Link(*key, late) for key, late in found.items()]


def died(life: Life, timeline: Timeline, now: float) -> bool:
    """Return whether a process was killed or failed; the last one counts as dead after a long silence."""
    if life.in_order:
        return False
    if life is not timeline.lives[-1]:
        return True
    times = [time for time in timeline.rounds if time >= life.start]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return bool(gaps) and now - life.end > _SILENT_INTERVALS * statistics.median(gaps)


class _Ticks:
    """Times of an island's round ends; a round ends again where a restart lost it."""

    def __init__(self, history: History):
        self._times: dict[int, list[float]] = {}
        for event in _of_kind(history, "round"):
            self._times.setdefault(event["round"], []).append(event["time"])

    def before(self, round: int, time: float) -> float | None:
        """Return the round's end that an event at `time` refers to; clocks of machines differ a little."""
        times = self._times.get(round, [])
        return max((other for other in times if other <= time), default=min(times, default=None))


def _lives(history: History) -> list[Life]:
    lives: list[Life] = []
    for event in history.events:
        if event["event"] == "start":
            lives.append(Life(event["time"], event["time"], False))
        elif lives:
            lives[-1] = Life(lives[-1].start, event["time"], event["event"] == "end")
    return lives


def _of_kind(history: History, kind: str) -> list[dict[str, Any]]:
    return [event for event in history.events if event["event"] == kind]


def _timed(history: History) -> float:
    """Return the seconds of all rounds that a log of this version has the whole of."""
    timed = 0.0
    for before, event in itertools.pairwise(e for e in history.events if e["event"] in ("start", "round")):
        if event["event"] == "round" and "exposed" in event:
            timed += event["time"] - before["time"]
    return timed


def _is_alone(event: Mapping[str, Any]) -> bool:
    """Return True for a message that had a partner and was not exchanged."""
    return event["outcome"] == "alone" and bool(event["partner"])


def _is_healing(event: Mapping[str, Any]) -> bool:
    return event["event"] == "exchange" and event["outcome"] == "healed"
