"""Digests of checkpoints: a file that has changed since it was saved is refused by name."""

import dataclasses
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
import xxhash

from noloco_jax.checkpoint import digests, elastic
from noloco_jax.checkpoint.digests import Entry, MismatchError
from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.checkpoint.trained_model import load_for_export
from noloco_jax.cluster.processes import OneProcess
from noloco_jax.config import save_config
from noloco_jax.errors import TransientError, UserError
from noloco_jax.spmd.programs import TrainState
from support.checkpoints import CONFIG, programs_of, saved
from support.processes import UNLISTED

FEWER = dataclasses.replace(CONFIG, num_replicas=2, elastic="merge")
STEP = Path("checkpoints/3")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, TrainState]:
    """Return a workdir with a checkpoint of step 3, and the saved state."""
    workdir = tmp_path_factory.mktemp("saved")
    state = saved(workdir, CONFIG)
    save_config(CONFIG, workdir)
    return workdir, state


@pytest.fixture
def workdir(whole, tmp_path) -> Path:
    """Return a copy of the saved workdir for a test to damage."""
    shutil.copytree(whole[0], tmp_path / "run")
    return tmp_path / "run"


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def resume(workdir: Path) -> TrainState:
    """Restore everything that a run reads to resume."""
    with Checkpointer(workdir, CONFIG, read_only=True) as checkpoints:
        found = checkpoints.start()
        assert found is not None and found.step == 3
        found.verify()
        elastic.data_positions(found, 4)
        return found.state(programs_of(CONFIG).state)


def resume_with_fewer_replicas(workdir: Path) -> None:
    with Checkpointer(workdir, FEWER, read_only=True) as checkpoints:
        elastic.restore(checkpoints.open(3), FEWER.model, programs_of(FEWER), FEWER.elastic)


def flip_a_bit(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def test_a_flipped_bit_is_refused_naming_the_file_or_changes_nothing(whole, workdir):
    """The commit marker and Orbax's metadata have no digest: they are written last and affect no restored value."""
    rng, state = random.Random(0), whole[1]
    names = files_of(workdir / STEP)
    assert {"run/metadata", "data/metadata", "state/_METADATA", "state/manifest.ocdbt"} < set(names)
    assert sum("/d/" in name for name in names) > 3
    for name in names:
        path = workdir / STEP / name
        before = path.read_bytes()
        for _ in range(3):
            flip_a_bit(path, rng)
            if name in UNLISTED - {"digests.txt"}:
                jax.tree.map(np.testing.assert_array_equal, resume(workdir), state)
                continue
            with pytest.raises(
                UserError, match=rf"checkpoints/3 cannot be read \({re.escape(name)} .*: start anew"
            ) as refused:
                resume(workdir)
            assert refused.value.exit_status == 2
            assert "\n" not in str(refused.value)
            path.write_bytes(before)
        path.write_bytes(before)
    jax.tree.map(np.testing.assert_array_equal, resume(workdir), state)


@pytest.mark.parametrize("read", [resume, resume_with_fewer_replicas, load_for_export])
@pytest.mark.parametrize("damage", ["a bit", "an end", "a file"])
def test_every_reader_of_weights_refuses_damaged_arrays(workdir, read: Callable, damage):
    path = max((workdir / STEP / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    if damage == "a bit":
        flip_a_bit(path, random.Random(1))
        reason = "does not match its digest in digests.txt"
    elif damage == "an end":
        path.write_bytes(path.read_bytes()[:-1])
        reason = r"has \d+ bytes, it was saved with \d+"
    else:
        path.unlink()
        reason = "is missing"
    with pytest.raises(UserError, match=rf"\({path.relative_to(workdir / STEP)} {reason}\)"):
        read(workdir)


def test_digests_match_the_files_on_disk(workdir):
    """The reference digests are of whole files."""
    first, *lines = (workdir / STEP / "digests.txt").read_text().splitlines(keepends=True)
    assert first.strip() == xxhash.xxh3_128_hexdigest("".join(lines).encode())
    listed = {name: (digest, int(size)) for digest, size, name in (line.split() for line in lines)}
    content = {name: (workdir / STEP / name).read_bytes() for name in files_of(workdir / STEP)}
    assert listed.keys() == content.keys() - UNLISTED
    for name in listed:
        assert listed[name] == (xxhash.xxh3_128_hexdigest(content[name]), len(content[name]))


def test_a_flipped_bit_in_any_piece_of_a_large_file_is_found(tmp_path):
    content = bytearray(2 * digests._PIECE + 1)
    (tmp_path / "large").write_bytes(content)
    digests.write_digests(tmp_path)
    entries = digests.read_digests(tmp_path) or {}
    digests.check_files(tmp_path, entries)
    for place in (0, digests._PIECE, -1):
        content[place] ^= 1
        (tmp_path / "large").write_bytes(content)
        with pytest.raises(MismatchError, match="large does not match its digest"):
            digests.check_files(tmp_path, entries)
        content[place] ^= 1


def test_unlisted_files_in_a_checkpoint_are_ignored(workdir):
    (workdir / STEP / ".DS_Store").write_bytes(b"of a file manager")
    resume(workdir)


def test_a_failure_to_write_digests_is_reported_and_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    def fail(path: Path, _: bytes) -> None:
        path.write_bytes(b"torn")
        raise OSError(5, "Input/output error")

    saved(tmp_path, CONFIG)
    monkeypatch.setattr(digests, "write_whole", fail)
    with pytest.raises(TransientError, match="could not be saved"):
        saved(tmp_path, CONFIG, step=7)
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "checkpoints").glob("7*")] == ["7.orbax-checkpoint-tmp"]
    resume(tmp_path)
    saved(tmp_path, CONFIG, step=8)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3", "8"]


def test_each_array_file_is_hashed_once_when_restoring(workdir, monkeypatch):
    read, entry = [], digests._entry

    def counted(file: Path) -> Entry:
        read.append(file)
        return entry(file)

    monkeypatch.setattr(digests, "_entry", counted)
    resume_with_fewer_replicas(workdir)
    arrays = [file for file in read if "/d/" in str(file)]
    assert len(arrays) == len(set(arrays)) > 1


def test_verification_shares_cover_each_file_once_and_are_balanced():
    rng = random.Random(0)
    entries = {f"{number:03}": Entry(rng.randrange(1, 100), "") for number in range(200)}
    shares = [digests.share_of(entries, index, 7) for index in range(7)]
    assert sorted(name for share in shares for name in share) == sorted(entries)
    sizes = [sum(entry.size for entry in share.values()) for share in shares]
    assert max(sizes) - min(sizes) <= 100


def test_damage_found_by_another_process_is_refused(workdir, monkeypatch):
    processes = OneProcess()
    monkeypatch.setattr(processes, "gather", lambda reason: [reason, "state/d/1 is missing"])
    with (
        Checkpointer(workdir, CONFIG, processes, read_only=True) as checkpoints,
        pytest.raises(UserError, match=r"cannot be read \(state/d/1 is missing\)"),
    ):
        checkpoints.open(3).verify()
