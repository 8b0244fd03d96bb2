"""Time of traced steps by part of the step: the operations of a profile, attributed to the parts."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from noloco_jax.bench.options import UNNAMED
from noloco_jax.spmd.hlo import operation_names

# The scopes (`jax.named_scope`) of the inner step, as they stand in an operation's name among transformations:
# jit(_inner_step)/transpose(jvp(attention))/dot_general. In quotes they are parameters: params['head'].
_SCOPE = re.compile(r"(?<![\w'])(embed|attention|mlp|head|optimizer)(?![\w'\\])")
_ONE_PASS = {"head": "head and loss", "optimizer": "optimizer"}
_LARGEST = 3


class Part(NamedTuple):
    """A part of a step.

    Attributes:
      name: the scope, and the pass where it has two; or the program, for operations in no scope.
      share: of the time of all operations.
      seconds: of one device in a step.
      largest: the operations that take most, each with its share.
    """

    name: str
    share: float
    seconds: float
    largest: list[tuple[str, float]]


class Event(NamedTuple):
    """An operation once on a device.

    Attributes:
      program: the name of its HLO module; "" if the profiler did not say.
      name: the HLO instruction's, or what the profiler calls it.
      start, end: in seconds.
    """

    program: str
    name: str
    start: float
    end: float


def parts_of(
    profile: Path, programs: Mapping[str, str], times: Mapping[str, int], num_devices: int
) -> tuple[list[Part], float]:
    """The parts of the steps in a profile, the largest first, and the share of the time in which no operation ran.

    A profile without operations, as of a profiler that may not look at the device, has no parts and a share of 1.

    Args:
      profile: the `.xplane.pb` file.
      programs: "inner_step", ... -> the compiled program as text.
      times: how often each ran.
      num_devices: that ran them side by side.
    """
    lines = [line for line in _lines(ProfileData.from_file(str(profile))) if line]
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    for line in lines:
        for operation, taken in _own_seconds(line):
            seconds[operation] += taken
    names = {text.removeprefix("HloModule ").partition(",")[0]: name for name, text in programs.items()}
    scopes = {module: operation_names(programs[name]) for module, name in names.items()}
    total = sum(seconds.values())
    in_parts: defaultdict[tuple[str, str], list[tuple[str, float]]] = defaultdict(list)
    for (module, operation), taken in sorted(seconds.items(), key=lambda item: -item[1]):
        program = names.get(module, module)
        in_parts[program, _part(program, scopes.get(module, {}).get(operation, []))].append((operation, taken))
    parts = []
    for (program, name), operations in in_parts.items():
        taken = sum(seconds for _, seconds in operations)
        largest = [(operation, seconds / total) for operation, seconds in operations[:_LARGEST]]
        steps = times.get(
            program, max(times.values(), default=1)
        )  # most operations without a program belong to inner steps
        parts.append(Part(name, taken / total, taken / num_devices / steps, largest))
    return sorted(parts, key=lambda part: -part.share), _idle_share(lines)


def _lines(profile: Any) -> Iterator[list[Event]]:
    """A `ProfileData`'s operations on every stream of the GPUs; without GPUs, on every thread that runs CPU devices."""
    planes = list(profile.planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for plane in gpus or planes:
        for line in plane.lines:
            # The other lines of a GPU tell of the same operations once more.
            if not gpus or line.name.startswith("Stream"):
                yield list(_events(line, all_of_them=bool(gpus)))


def _events(line: Any, all_of_them: bool) -> Iterator[Event]:
    for event in line.events:
        known = dict(event.stats)
        if all_of_them or "hlo_op" in known:
            module = re.sub(r"\(\d+\)$", "", str(known.get("hlo_module", "")))
            start, end = 1e-9 * event.start_ns, 1e-9 * (event.start_ns + event.duration_ns)
            yield Event(module, str(known.get("hlo_op", event.name)), start, end)


def _own_seconds(line: list[Event]) -> Iterator[tuple[tuple[str, str], float]]:
    """(program, operation) and the time of each event of a line, less that in which later ones run."""
    open_events: list[Event] = []
    for event in sorted(line, key=lambda event: (event.start, -event.end)):
        while open_events and open_events[-1].end <= event.start:
            open_events.pop()
        if open_events:  # a GPU may begin a kernel in the last moments of the one before
            last = open_events[-1]
            yield (last.program, last.name), event.start - min(event.end, last.end)
        yield (event.program, event.name), event.end - event.start
        open_events.append(event)


def _idle_share(lines: list[list[Event]]) -> float:
    """The share of the time from the first operation to the last in which none ran on any line."""
    events = sorted((event.start, event.end) for line in lines for event in line)
    if not events:
        return 1.0
    begin, busy_until, idle = events[0][0], events[0][1], 0.0
    for start, end in events:
        idle += max(start - busy_until, 0.0)
        busy_until = max(busy_until, end)
    return idle / (busy_until - begin)


def _part(program: str, operation_names: list[str]) -> str:
    """The part of an operation by the first of its names in a scope; those of what it fuses come after its own."""
    for name in operation_names:
        if scope := _SCOPE.search(name):
            if scope[0] in _ONE_PASS:
                return _ONE_PASS[scope[0]]
            return f"{scope[0]} {'backward' if 'transpose(' in name else 'forward'}"
    return {"inner_step": "rest of the inner step", "outer_step": "outer step"}.get(program, program or UNNAMED)
