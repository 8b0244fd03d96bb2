"""Digests in two real processes: each hashes the arrays that it saves and verifies its share of all files."""

import shutil
from pathlib import Path

import pytest
import xxhash

from support import processes
from support.digested import UNLISTED

pytestmark = pytest.mark.timeout(900)

STEP = Path("checkpoints/8")
UNFINISHED = ".orbax-checkpoint-tmp"


def run(config: Path, workdir: Path, log: Path, *arguments: str) -> tuple[list[tuple[int, str]], list[list[str]]]:
    """Run two processes; return their results and, for each, the files of checkpoint 8 it hashed, by final name."""
    log.mkdir()
    started = processes.start(config, workdir, *arguments, number=2, module=("support.digested", str(log)))
    results = processes.finish(started)
    read = [
        [line.partition(f"{STEP}/")[2] for line in (log / name).read_text().replace(UNFINISHED, "").splitlines()]
        for name in ("0", "1")
    ]
    return results, [[name for name in names if name] for names in read]


@pytest.fixture(scope="module")
def saved(config) -> tuple[Path, list[list[str]]]:
    """Return the workdir of a run that ended at step 8, and the files that each process hashed."""
    workdir = config.parent / "saved"
    results, digested = run(config, workdir, config.parent / "of_save", "--config.num_steps=8")
    assert [status for status, _ in results] == [0, 0], processes.report(results)
    return workdir, digested


def test_each_process_hashes_its_own_arrays_and_the_first_all_other_files(saved):
    workdir, digested = saved
    _, *lines = (workdir / STEP / "digests.txt").read_text().splitlines()
    listed = {name: (digest, int(size)) for digest, size, name in (line.split() for line in lines)}
    files = {str(path.relative_to(workdir / STEP)): path for path in (workdir / STEP).rglob("*") if path.is_file()}
    assert listed.keys() == files.keys() - UNLISTED
    for name in listed:
        content = files[name].read_bytes()
        assert listed[name] == (xxhash.xxh3_128_hexdigest(content), len(content))
    first, second = map(sorted, digested)
    assert second == sorted(name for name in listed if name.startswith("state/ocdbt.process_1/"))
    assert sorted(first + second) == sorted(listed)


def test_each_process_verifies_its_share_and_both_refuse_damage_found_by_one(config, saved, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(saved[0], workdir)
    results, compared = run(config, workdir, tmp_path / "whole", "--config.num_steps=24", "--dry_run")
    assert [status for status, _ in results] == [0, 0], processes.report(results)
    first, second = (set(names) for names in compared)
    small = {f"{item}/{name}" for item in ("run", "data") for name in ("metadata", "commit_success.txt")}
    assert first & second <= small  # every process reads these
    assert len(first) > 5 and len(second) > 5

    damaged = max((workdir / STEP / "state/ocdbt.process_1/d").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    results, _ = run(config, workdir, tmp_path / "damaged", "--config.num_steps=24")
    for status, output in results:
        assert status == 2, processes.report(results)
        [line] = [line for line in output.splitlines() if line.startswith("error: ")]
        assert f"checkpoints/8 cannot be read (state/ocdbt.process_1/d/{damaged.name} does not match its digest" in line
        assert "Traceback" not in output
