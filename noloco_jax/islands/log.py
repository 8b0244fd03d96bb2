"""Event log of an island, WORKDIR/island.jsonl: one line per event, appended and never rewritten.

metrics.jsonl is rewritten from the checkpoint where a run resumes. This log keeps the rounds that were lost, as they
took time.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from noloco_jax.errors import TransientError, UserError
from noloco_jax.islands.agent import Met
from noloco_jax.islands.recent import event_time

LOG_FILE = "island.jsonl"


class IslandLog:
    """Writer of events: {"time": seconds since 1970, "event": one of these methods' names, ...}.

    Args:
      workdir: the island's workdir; made when missing.
      name: the island's name.
      listener: called with every event.

    Attributes:
      name: the island's name.
      one_sided: number of exchanges, over all starts, that only the partner may have applied.
    """

    def __init__(self, workdir: Path, name: str, listener: Callable[[Mapping[str, Any]], None] = lambda event: None):
        workdir.mkdir(parents=True, exist_ok=True)
        self._path = workdir / LOG_FILE
        self.name = name
        self._listener = listener
        self._gave_way = self._exposed = 0.0  # seconds up to the last round
        if self._path.exists():  # the process before this one may have been killed in the middle of a line
            content = self._path.read_bytes()
            os.truncate(self._path, content.rfind(b"\n") + 1)
        events = earlier_events(workdir)
        self.one_sided = sum(event["event"] == "exchange" and event["one_sided"] for event in events)
        # Earlier versions logged starts without seconds.
        self._first = next((event for event in events if event["event"] == "start" and "seconds" in event), None)

    def start(self, step: int, seconds: float) -> None:
        """Log that a process of the island begins to train, after inner step `step` and `seconds` of the run."""
        event = self._write("start", name=self.name, step=step, seconds=seconds)
        self._first = self._first or event

    def goodput(self, seconds: float) -> float:
        """Return the share, up to 1, of the time since the first start that the weights have behind them.

        Training lost when a process was killed does not count, nor the time until the next one trained.

        Args:
          seconds: the run's seconds of training up to now, see `Totals`.
        """
        if self._first is None:
            return 1.0
        gone = event_time() - self._first["time"]
        return min((seconds - self._first["seconds"]) / gone, 1.0) if gone > 0 else 1.0

    def round(self, round: int, step: int, gave_way: float, exposed: float) -> None:
        """Log the end of a round.

        Args:
          round: the round.
          step: the last inner step.
          gave_way: seconds of pauses for slower islands, since the start.
          exposed: seconds that training stood still for exchanges besides, since the start.
        """
        seconds = {"gave_way": gave_way - self._gave_way, "exposed": exposed - self._exposed}
        self._write("round", round=round, step=step, **seconds)
        self._gave_way, self._exposed = gave_way, exposed

    def exchange(self, met: Met, sent: int | float) -> None:
        """Log the outcome of a round's message; `sent` are the bytes that the partner has received of it."""
        self.one_sided += met.one_sided
        self._write(
            "exchange",
            round=met.round,
            partner=met.partner,
            outcome=met.outcome,
            lag=met.lag,
            steps_late=met.steps_late,
            reason=met.reason,
            one_sided=met.one_sided,
            sent=sent,
        )

    def end(self, finished: bool) -> None:
        """Log a regular end of the process: after the last step of the run, or told to stop."""
        self._write("end", finished=finished)

    def _write(self, event: str, **values: Any) -> dict[str, Any]:
        written = {"time": event_time(), "event": event, **values}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(written) + "\n")
        except OSError as error:
            raise TransientError(
                f"{self._path} cannot be written ({error.strerror}): make room; the same command resumes from the "
                "last checkpoint"
            ) from None
        self._listener(written)
        return written


class History(NamedTuple):
    """Log of an island: its name, and its events in the order of time."""

    name: str
    events: list[dict[str, Any]]


def earlier_events(workdir: Path) -> list[dict[str, Any]]:
    """Return the events of an island's earlier starts; `UserError` where a line of its log is none."""
    path = workdir / LOG_FILE
    return _events(path) if path.exists() else []


def read_log(workdir: Path) -> History:
    """Return the events of an island's workdir so far; a line that is being written is left out.

    Raises `UserError` where there is no island's log, or a line of it is none.
    """
    path = workdir / LOG_FILE
    try:
        events = _events(path)
    except FileNotFoundError:
        raise UserError(f"{path} is not there: give the --workdir of an island") from None
    names = [event["name"] for event in events if event["event"] == "start"]
    if not names:
        raise UserError(f"{path} holds no start yet: give the folders of islands that train")
    return History(names[-1], events)


def _events(path: Path) -> list[dict[str, Any]]:
    """Return a log's events, leaving out a line that is being written."""
    try:
        events = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        _ = [event["event"] for event in events]
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{path} has a line that is no event of an island: correct or remove it") from None
    return events
