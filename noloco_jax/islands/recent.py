"""Recent events of an island, kept for those who watch it: bounded, numbered, and read bit by bit."""

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

WATCH = "watch"  # the action that returns an island's state and its recent events
LONGEST_LINE = 400
FIGURES = ("loss", "perplexity", "tokens", "tokens_per_second", "goodput")
_LIMITS = {"figures": 240, "notice": 60}  # events that are kept of a kind; of all others together:
_LIMIT = 720
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # Linux's also counts while a machine is suspended
_AHEAD = time.time() - time.clock_gettime(_CLOCK)


def event_time() -> float:
    """Return seconds since 1970, by the clock as it was at the process's start: setting it moves no later event."""
    return round(time.clock_gettime(_CLOCK) + _AHEAD, 3)


class Recent:
    """Events of an island, the newest of each kind, and totals over all of them. Thread-safe.

    An event is a mapping with "time", in seconds since 1970, and "event", its kind: those of the event log
    (`islands.log`), "figures" of the training, and "notice", a line for people.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._kept: dict[str, deque[tuple[int, Mapping[str, Any]]]] = {}
        self._totals = {"starts": 0, "rounds": 0, "sent": 0, "gave_way": 0.0, "exposed": 0.0, "one_sided": 0}
        self._totals |= {"met": 0, "late": 0, "alone": 0, "healed": 0}

    def add(self, event: Mapping[str, Any]) -> None:
        """Keep an event; the oldest of its kind is dropped where there are too many."""
        kind = event["event"]
        with self._lock:
            group = kind if kind in _LIMITS else "log"
            kept = self._kept.setdefault(group, deque(maxlen=_LIMITS.get(group, _LIMIT)))
            kept.append((next(self._numbers), event))
            self._count(kind, event)

    def add_figures(self, step: int, values: Mapping[str, Any]) -> None:
        """Keep figures of the training after inner step `step`; only those of `FIGURES`, where they are finite."""
        given = ((name, values[name]) for name in FIGURES if isinstance(values.get(name), int | float))
        known = {name: value for name, value in given if math.isfinite(value)}
        if known:
            self.add({"time": event_time(), "event": "figures", "step": step, **known})

    def after(self, number: int) -> tuple[list[Mapping[str, Any]], int]:
        """Return the kept events after `number`, in their order, and the number of the newest; 0: from the first."""
        with self._lock:
            new = [pair for kept in self._kept.values() for pair in kept if pair[0] > number]
        new.sort(key=lambda pair: pair[0])
        return [event for _, event in new], new[-1][0] if new else number

    @property
    def totals(self) -> dict[str, float]:
        """Return totals of the event log over all starts: rounds, outcomes of messages, bytes sent, seconds."""
        with self._lock:
            return dict(self._totals)

    def _count(self, kind: str, event: Mapping[str, Any]) -> None:
        totals = self._totals
        match kind:
            case "start":
                totals["starts"] += 1
            case "round":
                totals["rounds"] += 1
                totals["gave_way"] += event["gave_way"]
                totals["exposed"] += event.get("exposed", 0.0)  # logs of earlier versions lack it
            case "exchange":
                if event["outcome"] != "alone" or event["partner"]:  # a round without a partner is no failure
                    totals[event["outcome"]] += 1
                totals["sent"] += event["sent"]
                totals["one_sided"] += event["one_sided"]
