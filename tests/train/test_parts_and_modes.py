"""The package README's table of parts and modes: equal numbers where a mode has a part, elsewhere a refusal with why.

Its columns are an own loop, one program, and islands.
"""

import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from noloco_jax.config import MeshConfig, OuterConfig, TrainConfig
from noloco_jax.errors import UserError
from noloco_jax.islands.membership import Membership
from support import modes
from support.paths import ROOT
from support.rosters import on_loopback
from support.training_islands import NAMES

# Layouts of one program: all replicas on one device, several per device, sharded replicas, pipeline stages.
VIRTUAL = MeshConfig(replica=1)
SLOTS = MeshConfig(replica=2)
CUBE = MeshConfig(replica=2, fsdp=2, tensor=2)
STAGES = MeshConfig(replica=4, stage=2)
# Smaller layouts for delayed exchanges, which take as many devices again.
FSDP = MeshConfig(replica=2, fsdp=2)
FEW_STAGES = MeshConfig(replica=2, stage=2)

SAME = "gives the numbers of the other modes"
USERS = "is the user's own"


class No(NamedTuple):
    """Mark of a part that a mode does not have, with the reason of the refusal if a config can request it."""

    reason: str = ""


class Setting(NamedTuple):
    """Use of a part: a method, its outer steps, and the layouts to run it in as one program."""

    outer: OuterConfig
    meshes: tuple[MeshConfig, ...] = (SLOTS,)
    method: str = "noloco"

    @property
    def config(self) -> TrainConfig:
        return dataclasses.replace(modes.CONFIG, method=self.method, outer=self.outer)


class Row(NamedTuple):
    """Row of a part: per mode SAME, USERS, No, or the file of its tests; and the settings that test SAME."""

    own_loop: Any
    one_program: Any
    islands: Any
    settings: tuple[Setting, ...] = ()


def every(sync_every: int = 2, **outer: Any) -> OuterConfig:
    return OuterConfig(sync_every=sync_every, **outer)


IN_PAIRS = No("islands exchange in pairs|they exchange in pairs")
CARRIED: dict[str, Any] = {"momentum_of": "corrections", "momentum": 0.3}
BEST: dict[str, Any] = {"wire": "modulo4", "fragments": 4, "order": "hypercube", "lr": 1.0, **CARRIED}
TABLE = {
    "pairs (noloco)": Row(SAME, SAME, SAME, (Setting(every(), (VIRTUAL,)),)),
    "groups of more than two": Row(
        SAME,
        SAME,
        IN_PAIRS,
        (  # with stages, halves of quantized messages are cut inside each stage
            Setting(every(group_size=4), (STAGES,)),
            Setting(every(group_size=4, wire="int8"), (CUBE,)),
            Setting(every(group_size=3, wire="int8"), (STAGES,)),
        ),
    ),
    "epidemic, diloco, sparseloco": Row(
        SAME,
        SAME,
        IN_PAIRS,
        (
            Setting(every(wire="int4"), (CUBE,), "epidemic"),
            Setting(every(fragments=2), (SLOTS,), "diloco"),
            Setting(every(wire="int4"), (CUBE,), "diloco"),
            Setting(every(), (CUBE,), "sparseloco"),
        ),
    ),
    "inner optimizer": Row("optim/test_loop", "spmd/test_layouts", "islands/test_training"),
    # The settings of modulo4 test these too.
    "fragments, hypercube order, momentum of corrections": Row(SAME, SAME, SAME),
    "quantized: bfloat16, int8, int4": Row(
        SAME,
        SAME,
        SAME,
        (Setting(every(wire="int8", fragments=2), (CUBE,)),),
    ),
    "quantized: modulo4": Row(SAME, SAME, SAME, (Setting(every(4, **BEST)),)),
    "exchange overlaps training": Row(
        SAME,
        SAME,
        "islands/test_training",
        (
            Setting(every(4, delay=3, **BEST), (FEW_STAGES,)),
            Setting(every(1, delay=1, wire="int8"), (SLOTS,), "epidemic"),
            Setting(every(delay=1, fragments=2), (FSDP,), "diloco"),
        ),
    ),
    "outer state in host memory": Row(
        No(),
        SAME,
        "islands/test_training",
        (
            Setting(every(offload=True), (CUBE,)),
            Setting(every(offload=True, delay=1)),
        ),
    ),
    "FSDP, tensor parallel inside a replica": Row(USERS, "spmd/test_layouts", "islands/test_training"),
    "pipeline stages, random routing": Row(No(), "spmd/test_pipeline", No("to spread a model over devices")),
    "resume with other replicas": Row(USERS, "processes/test_train", "islands/test_members"),
    "unequal speed of machines": Row(No(), No(), "islands/test_training"),
    "loss of a machine": Row(USERS, "processes/test_kills", "islands/test_several_processes"),
    "merged model": Row(USERS, "train/test_loop", "islands/test_merge"),
}


def settings(mode: str) -> list[Any]:
    """Return the settings of all rows with SAME in the column of a mode."""
    return [
        pytest.param(setting, id=f"{part} {number}")
        for part, row in TABLE.items()
        for number, setting in enumerate(row.settings)
        if getattr(row, mode) == SAME
    ]


@functools.cache
def expected(setting: Setting) -> Any:
    """Return the numbers of an own loop."""
    return modes.own_loop(setting.config)


def assert_same(actual: Any, setting: Setting) -> None:
    """Compare all numbers, allowing a few that a rounding error moves to the other side of a quantization step.

    One in a thousand may differ; in block formats also all 64 of a block, at both partners, through a common scale.
    """
    in_blocks = (setting.outer.wire or "float32").startswith(("int", "modulo"))
    for (path, mine), theirs in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected(setting)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-2, err_msg=str(path))
        differ = np.sum(np.abs(mine.astype(np.float32) - theirs.astype(np.float32)) > 1e-6)
        assert differ <= (2 * 64 if in_blocks and mine.size > 4096 else mine.size // 1000), path


@pytest.mark.parametrize("setting", settings("one_program"))
def test_one_program_gives_the_numbers_of_an_own_loop(setting):
    for mesh in setting.meshes:
        assert_same(modes.one_program(setting.config, mesh), setting)


@pytest.mark.parametrize("setting", settings("islands"))
def test_islands_give_the_numbers_of_an_own_loop(setting, tmp_path):
    assert_same(modes.islands(setting.config, tmp_path), setting)


@pytest.mark.parametrize("part", [part for part, row in TABLE.items() if getattr(row.islands, "reason", "")])
def test_islands_refuse_unsupported_parts_with_the_reason(part):
    roster = on_loopback(*NAMES)
    row = TABLE[part]
    staged = dataclasses.replace(modes.CONFIG, mesh=dataclasses.replace(modes.CONFIG.mesh, stage=2))
    for config in [setting.config for setting in row.settings] or [staged]:
        without_delay = dataclasses.replace(config, outer=dataclasses.replace(config.outer, delay=0))
        with pytest.raises(UserError, match=row.islands.reason):
            Membership(roster, "paris", None).check(without_delay)


def test_the_readme_table_matches_this_table():
    text = (ROOT / "noloco_jax/README.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in re.findall(r"^\|.*\|$", text, re.MULTILINE)]
    start = rows.index(["part", "own loop", "one program (`train`)", "islands"]) + 2
    found = {row[0]: row[1:] for row in rows[start : start + len(TABLE)]}
    assert list(found) == list(TABLE)
    for part, cells in found.items():
        for cell, mine in zip(cells, TABLE[part][:3], strict=True):
            assert bool(re.match(r"no\b", cell)) == isinstance(mine, No), (part, cell)
            assert cell.startswith("your") == (mine is USERS), (part, cell)
            assert not cell.startswith("yes") or mine is SAME or (ROOT / f"tests/{mine}.py").exists(), (part, cell)


def test_files_named_in_table_cells_exist():
    names = {cell for row in TABLE.values() for cell in row[:3] if isinstance(cell, str)} - {SAME, USERS}
    assert not [name for name in names if not (ROOT / f"tests/{name}.py").exists()]
