"""What happened to an island and when, in WORKDIR/island.jsonl: a line an event, added to and never written anew.

metrics.jsonl tells a run as if nothing had come in between: one that goes on from a checkpoint writes the lines of the
steps behind it again. Here the rounds that were lost stay, as they took their time.
"""

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from noloco_jax.errors import TransientError, UserError
from noloco_jax.islands.station import Met

LOG_FILE = "island.jsonl"


class IslandLog:
    """Writes events: {"time": seconds since 1970, "event": one of these methods' names, ...}.

    Args:
      workdir: of the island; made when missing.
      name: of the island.
    """

    def __init__(self, workdir: Path, name: str):
        workdir.mkdir(parents=True, exist_ok=True)
        self._path = workdir / LOG_FILE
        self._name = name
        self._gave_way = 0.0  # up to the last round
        if self._path.exists():  # the process before this one may have been killed in the middle of a line
            content = self._path.read_bytes()
            os.truncate(self._path, content.rfind(b"\n") + 1)

    def start(self, step: int) -> None:
        """A process of the island begins to train, after inner step `step`."""
        self._write("start", name=self._name, step=step)

    def round(self, round: int, step: int, gave_way: float) -> None:
        """A round was ended, after inner step `step`, and after so many seconds for islands that are later."""
        self._write("round", round=round, step=step, gave_way=gave_way - self._gave_way)
        self._gave_way = gave_way

    def exchange(self, met: Met, sent: int | float) -> None:
        """It is known what became of a round's message; `sent` are the bytes that its partner has got of it."""
        self._write(
            "exchange",
            round=met.round,
            partner=met.partner,
            outcome=met.outcome,
            lag=met.lag,
            reason=met.reason,
            one_sided=met.one_sided,
            sent=sent,
        )

    def end(self, finished: bool) -> None:
        """The process ends as it should: after the last step of the run, or told to stop."""
        self._write("end", finished=finished)

    def _write(self, event: str, **values: Any) -> None:
        line = json.dumps({"time": round(time.time(), 3), "event": event, **values}) + "\n"
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise TransientError(
                f"{self._path} cannot be written ({error.strerror}): make room, the same command goes on from the "
                "last checkpoint"
            ) from None


class History(NamedTuple):
    """An island's name, and its events in the order of time."""

    name: str
    events: list[dict[str, Any]]


def read_log(workdir: Path) -> History:
    """What has happened to the island of a folder so far; a line that is being written is left out.

    Raises `UserError` where there is no island's log, or a line of it is none.
    """
    path = workdir / LOG_FILE
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        events = [json.loads(line) for line in lines]
        names = [event["name"] for event in events if event["event"] == "start"]
        if not names:
            raise UserError(f"{path} tells of no start yet: give the folders of islands that train")
    except FileNotFoundError:
        raise UserError(f"{path} is not there: give the --workdir of an island") from None
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{path} has a line that is no event of an island: mend or remove it") from None
    return History(names[-1], events)
