"""Scalars for TensorBoard: every write is in the file when it returns, so that a killed process loses none."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2

_events: Any = event_pb2  # protobuf makes their classes when they are imported, where no type checker sees them
_summaries: Any = summary_pb2


class TensorBoardWriter:
    """Writer of one event file in a folder.

    Args:
      folder: made when missing; TensorBoard reads its files in the order of creation.
      purge_step: the first step that will be written again: TensorBoard discards it and later steps from earlier files.
        None: no step is.
    """

    def __init__(self, folder: Path, purge_step: int | None):
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard's default names have a resolution of one second, and a run may restart within it.
        self._file = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        if purge_step is not None:
            start = _events.SessionLog(status=_events.SessionLog.START)
            self._write(_events.Event(step=purge_step, session_log=start))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the numbers of a step by their tags."""
        values = [_summaries.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(_events.Event(step=step, summary=_summaries.Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._file.write_event(event)
        self._file.flush()
