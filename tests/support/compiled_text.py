"""Collectives in the text of a compiled program, the partitioner's included: the oracle of readings of jaxprs."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

KINDS = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\]")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}")


class Found(NamedTuple):
    """One instruction.

    Attributes:
      kind: in HLO's words.
      axes: the mesh axes in which devices that exchange data differ.
      bytes: of its results on one device.
      num_pairs: of a collective-permute, the pairs of devices on different coordinates of the first axis.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    num_pairs: int


def collectives_in(text: str, mesh_shape: Mapping[str, int]) -> list[Found]:
    """Return the collectives of a compiled program of all devices of a mesh, each instruction once."""
    found = []
    for line in text.splitlines():
        match = re.search(rf"= (\(?[^=]*?) ({KINDS})(-start)?\(", line)
        if match is None:
            continue
        groups = _groups(line, mesh_shape)
        sizes = tuple(mesh_shape.values())
        coordinates = np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), axis=-1)
        differ = np.array([(coordinates[group] != coordinates[group[0]]).any(axis=0) for group in groups])
        shapes = [(int(re.sub(r"\D", "", kind) or 8), dims) for kind, dims in _ARRAY.findall(match[1])]
        size = sum(bits * math.prod(int(d) for d in dims.split(",") if d) // 8 for bits, dims in shapes)
        axes = tuple(axis for place, axis in enumerate(mesh_shape) if differ[:, place].any())
        found.append(Found(match[2], axes, size, int(differ[:, 0].sum())))
    return [one for one in found if one.axes]


def _groups(line: str, mesh_shape: Mapping[str, int]) -> list[list[int]]:
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", line):
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    if iota := _IOTA.search(line):
        shape, dims, order = ([int(n) for n in text.split(",")] if text else None for text in iota.groups())
        assert shape is not None and dims is not None
        return np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape).tolist()
    if mesh := _MESH.search(line):  # from jax 0.12 on
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        axes = [[*sizes].index(name) for name in re.findall(r"\w+", mesh[2])]
        devices = np.arange(math.prod(sizes.values())).reshape([*sizes.values()])
        size = math.prod(devices.shape[axis] for axis in axes)
        return np.moveaxis(devices, axes, range(-len(axes), 0)).reshape(-1, size).tolist()
    if "replica_groups={}" in line or "replica_groups" not in line:
        return [list(range(math.prod(mesh_shape.values())))]
    raise ValueError(f"unknown form of replica_groups: {line[:300]}")
