"""TensorBoard's event files, read without TensorBoard."""

import importlib
import struct
from pathlib import Path
from typing import Any


def events(workdir: Path, name: str = "tensorboard") -> list[list[Any]]:
    """The events of each file, read by their framing: length, checksum, record, checksum.

    A record that a full disk or a kill cut short ends its file, as it does for TensorBoard.
    """
    event_pb2: Any = importlib.import_module("tensorboardX.proto.event_pb2")
    files = []
    for path in sorted((workdir / name).iterdir()):
        data, found = path.read_bytes(), []
        while len(data) >= 8:
            (length,) = struct.unpack("<Q", data[:8])
            if len(data) < 16 + length:
                break
            found.append(event_pb2.Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
        files.append(found)
    return files


def shown(workdir: Path) -> list[tuple[int, str, float]]:
    """(step, tag, value) of what TensorBoard shows: a session's start forgets the steps from its own on."""
    values: list[tuple[int, str, float]] = []
    for event in (event for file in events(workdir) for event in file):
        if event.HasField("session_log"):
            values = [value for value in values if value[0] < event.step]
        values += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return values
