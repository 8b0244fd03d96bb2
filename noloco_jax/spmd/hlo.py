"""Communication of a compiled program, read from its optimized HLO: bytes, counts and mesh axes of its collectives.

Also the JAX operations from which its instructions were made.

HLO is the text of `compiled.as_text()`. Device p of its groups is device p of `mesh.devices.flat`, whatever its id.
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

Groups = Sequence[Sequence[int]] | np.ndarray
KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
)
# A backend may split a collective-permute into these two, or any collective into NAME-start and NAME-done.
_OPCODES = {**{name: name for name in KINDS}, **{f"{name}-start": name for name in KINDS}, "send": "collective-permute"}

_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+)(?: \(.*)? \{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (.*)")
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\]")
_REFERENCE = re.compile(r"(\w+)=(?:\{(%[^}]*)\}|%([\w.\-]+))")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_PAIRS = re.compile(r'source_target_pairs="?(\{\{.*?\}\}|\{\})')
_LISTED = re.compile(r"replica_groups=(\{\{.*?\}\}|\{\})")
_IOTA = r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
_IOTA_GROUPS = re.compile(rf"replica_groups={_IOTA}")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? \{(.*?)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation.

    Attributes:
      kind: one of `KINDS`.
      axes: the mesh axes in which devices that exchange data differ, in the mesh's order; none if none do.
      bytes: bytes of its operands on one device.
      operands: shapes of its operands, in HLO's notation.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    operands: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of one run of a program.

    Attributes:
      always: collective -> how often it runs outside conditionals.
      choices: for each conditional, how often it is reached, and its branches, one of which runs each time.
      exact: False if a loop of unknown length contains collectives; these are counted once.
    """

    always: Counter[Collective] = dataclasses.field(default_factory=Counter)
    choices: tuple[tuple[int, tuple["Traffic", ...]], ...] = ()
    exact: bool = True

    def __bool__(self) -> bool:
        return bool(self.always or self.choices)

    def extent(self, weight: Callable[[Collective], int]) -> tuple[int, int]:
        """Return the least and the largest total weight of a run's collectives over all choices of branches."""
        least = most = sum(weight(collective) * times for collective, times in self.always.items())
        for times, branches in self.choices:
            extents = [branch.extent(weight) for branch in branches]
            least += times * min(low for low, _ in extents)
            most += times * max(high for _, high in extents)
        return least, most

    def times(self, collective: Collective) -> tuple[int, int]:
        """Return the minimum and maximum number of times that a run executes this collective."""
        return self.extent(lambda other: int(other == collective))

    def collectives(self) -> list[Collective]:
        """Return every distinct collective of any branch, the largest first."""
        found = set(self.always)
        for _, branches in self.choices:
            found.update(*(branch.collectives() for branch in branches))
        return sorted(found, key=lambda c: (-c.bytes, c.kind, c.axes, c.operands))

    def num_branches(self, collective: Collective) -> int:
        """Return the branches of the largest conditional that contains the collective; 0 if none does."""
        counts = [len(b) for _, b in self.choices if any(collective in branch.collectives() for branch in b)]
        return max(counts, default=0)


def read_hlo(hlo: str, mesh_shape: Mapping[str, int]) -> Traffic:
    """Read the collectives of a compiled program.
    Args:
      hlo: `compiled.as_text()` of a program over all devices of the mesh.
      mesh_shape: axis name -> size, in the mesh's order.

    Raises:
      ValueError: if the text holds a collective in an unknown form, or is for another number of devices.
    """
    num_devices = math.prod(mesh_shape.values())
    partitions = re.search(r"num_partitions=(\d+)", hlo.partition("\n")[0])
    if (int(partitions[1]) if partitions else 1) != num_devices or "replica_count=" in hlo.partition("\n")[0]:
        raise ValueError(f"the program is not one of {num_devices} partitions: {hlo.partition(chr(10))[0][:200]}")
    computations, entry = _parse(hlo)

    @functools.cache
    def traffic(name: str) -> Traffic:
        parts = [part for line in computations[name].values() if (part := instruction(line, computations[name]))]
        return _sum(parts)

    def instruction(line: "_Instruction", scope: dict[str, "_Instruction"]) -> Traffic:
        if line.opcode in _OPCODES and "is_host_transfer=true" not in line.attributes:
            return Traffic(Counter([_collective(line, scope, mesh_shape)]))
        called = [
            (key, [traffic(name) for name in re.findall(r"%([\w.\-]+)", several or f"%{one}") if name in computations])
            for key, several, one in _REFERENCE.findall(line.attributes)
            if key != "predecessors"  # control-predecessors: instructions
        ]
        inside = [part for _, parts in called for part in parts]
        if not any(inside):
            return Traffic()
        if line.opcode == "conditional":
            return Traffic(choices=((1, tuple(inside)),), exact=all(part.exact for part in inside))
        if line.opcode == "while":
            trips = _TRIP_COUNT.search(line.attributes)
            return _repeat(_sum(inside), int(trips[1]) if trips else None)
        return _sum(inside)

    return traffic(entry)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    text: str  # after "NAME = "

    @functools.cached_property
    def _parts(self) -> tuple[str, str, str, str]:
        shape_end = _balanced(self.text, 0) if self.text.startswith("(") else self.text.index(" ")
        operands_start = self.text.index("(", shape_end)
        operands_end = _balanced(self.text, operands_start)
        opcode = self.text[shape_end:operands_start].strip()
        operands = self.text[operands_start + 1 : operands_end - 1]
        return self.text[:shape_end], opcode, operands, self.text[operands_end:]

    @property
    def shape(self) -> str:
        return self._parts[0]

    @property
    def opcode(self) -> str:
        return self._parts[1]

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self._parts[2])

    @property
    def attributes(self) -> str:
        return self._parts[3]


def _parse(hlo: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    """Return computation name -> instruction name -> instruction, and the name of the entry computation."""
    computations: dict[str, dict[str, _Instruction]] = {}
    entry, current = "", None
    for line in re.sub(r"/\*.*?\*/", "", hlo).splitlines():
        if match := _COMPUTATION.match(line):
            current = computations.setdefault(match[1], {})
            entry = match[1] if line.startswith("ENTRY") else entry
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current[match[1]] = _Instruction(match[2])
    if not entry:
        raise ValueError("the HLO has no ENTRY computation")
    return computations, entry


def _balanced(text: str, start: int) -> int:
    """Return the position after the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    raise ValueError(f"unbalanced parentheses in HLO: {text[:200]}")


def _sum(parts: Iterable[Traffic]) -> Traffic:
    total, choices, exact = Counter(), [], True
    for part in parts:
        total.update(part.always)
        choices += part.choices
        exact &= part.exact
    return Traffic(total, tuple(choices), exact)


def _repeat(traffic: Traffic, trips: int | None) -> Traffic:
    if trips is None:
        return dataclasses.replace(traffic, exact=False)
    always = Counter({collective: times * trips for collective, times in traffic.always.items()})
    return Traffic(always, tuple((times * trips, branches) for times, branches in traffic.choices), traffic.exact)


def _collective(line: _Instruction, scope: dict[str, _Instruction], mesh_shape: Mapping[str, int]) -> Collective:
    shapes = [scope[name].shape for name in line.operands if name in scope]
    if not shapes:
        raise ValueError(f"no operands are known of the HLO instruction {line.text[:200]}")
    arrays = [match for shape in shapes for match in _ARRAY.finditer(shape) if _bits(match[1])]
    return Collective(
        kind=_OPCODES[line.opcode],
        axes=_crossed(_groups(line, math.prod(mesh_shape.values())), mesh_shape),
        bytes=sum(_bits(match[1]) * math.prod(_numbers(match[2])) // 8 for match in arrays),
        operands=tuple(match[0] for match in arrays),
    )


def _bits(dtype: str) -> int:
    """Return the bits of an element of a type such as f32, bf16, s4, f8e4m3fn, pred; 0 for a token."""
    if dtype == "pred":
        return 8
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 0


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _groups(line: _Instruction, num_devices: int) -> Groups:
    """Return the groups of devices that exchange data with each other."""
    attributes = line.attributes.partition(", metadata=")[0]
    everyone = [list(range(num_devices))]
    if pairs := _PAIRS.search(attributes):
        # Without a channel the ids are those of XLA's replicas, and a partitioned program has only one.
        return _lists(pairs[1]) if "channel_id=" in attributes else []
    if "channel_id=" not in attributes:
        return []
    if line.opcode.startswith(("all-reduce", "all-gather", "reduce-scatter")) and (
        "use_global_device_ids=true" not in attributes
    ):
        return everyone  # groups of XLA's replicas, each with all of its partitions
    if listed := _LISTED.search(attributes):
        return _lists(listed[1]) or everyone
    if iota := _IOTA_GROUPS.search(attributes):
        return _iota(*iota.groups())
    if mesh := _MESH_GROUPS.search(attributes):
        return _mesh_groups(*mesh.groups())
    if "replica_groups=" in attributes:
        raise ValueError(f"unknown form of replica_groups in HLO: {attributes[:200]}")
    return everyone


def _lists(text: str) -> list[list[int]]:
    """Parse lists such as `{{0,1},{2,3}}`."""
    return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text)]


def _iota(shape: str, reshape: str, transpose: str | None) -> np.ndarray:
    """Parse `[2,4]<=[4,2]T(1,0)`: the numbers from 0 in shape (4, 2), transposed and reshaped to (2, 4)."""
    box = np.arange(math.prod(_numbers(reshape))).reshape(_numbers(reshape))
    return box.transpose(_numbers(transpose) if transpose else None or range(box.ndim)).reshape(_numbers(shape))


def _mesh_groups(axes: str, device_ids: str | None, grouped: str) -> np.ndarray:
    """Parse `mesh['a'=4,'b'=2], device_ids=(...) {'b','a':(1)2}`: a group spans the named axes or parts of them."""
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", axes)}
    parts: dict[str, list[tuple[int, int]]] = {}
    for name, before, size in re.findall(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", grouped):
        parts.setdefault(name, []).append((int(before or 1), int(size or sizes[name])))
    dims, within = [], []
    for name, axis_size in sizes.items():
        done = 1
        for before, size in sorted(parts.get(name, [])):
            within += [len(dims) + 1]
            dims += [before // done, size]
            done = before * size
        dims.append(axis_size // done)
    ids = _mesh_devices(device_ids, math.prod(sizes.values())).reshape(dims)
    outside = [dim for dim in range(len(dims)) if dim not in within]
    return ids.transpose([*outside, *within]).reshape(-1, math.prod(dims[dim] for dim in within))


def _mesh_devices(device_ids: str | None, num_devices: int) -> np.ndarray:
    """Parse the mesh's devices in its order: `(0,2,1,3)`, `([4,2]T(1,0))`, or None for their natural order."""
    if device_ids is None:
        return np.arange(num_devices)
    box = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", device_ids)
    if box is None:
        return np.array(_numbers(device_ids))
    return _iota(str(num_devices), box[1], box[2])


def _crossed(groups: Groups, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes in which devices of a group have different coordinates."""
    sizes = tuple(mesh_shape.values())
    coordinates = np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes))
    differ = np.zeros(len(sizes), bool)
    for group in groups:
        of_group = coordinates[:, np.asarray(group)]
        differ |= (of_group != of_group[:, :1]).any(axis=1)
    return tuple(axis for axis, crossed in zip(mesh_shape, differ, strict=True) if crossed)
