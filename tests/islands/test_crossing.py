"""Real processes: a run of one program goes on as islands, and islands as a run of one program."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from noloco_jax import island
from support.islands import free_ports
from support.paths import ROOT
from support.processes import environment, finish, metrics, report, trained, weights, write_config

NAMES = ("paris", "berlin")
COMMON = ("--config.num_replicas=2", "--config.keep_checkpoints=9")


def cut(workdir: Path, step: int) -> None:
    """Takes a run back to a checkpoint, as if it had been stopped there."""
    for folder in (workdir / "checkpoints").iterdir():
        if folder.name.isdigit() and int(folder.name) > step:
            shutil.rmtree(folder)


def train_islands(config: Path, roster: Path, folder: Path) -> list[Path]:
    """Trains both to the end, each exchange waited for; returns their folders."""
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "noloco_jax.island", "train", f"--config={config}", f"--roster={roster}"),
                *(f"--name={name}", f"--workdir={folder / name}", "--at_once", *COMMON),
            ],
            env=environment(config),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in NAMES
    ]
    results = finish(processes)
    assert [status for status, _ in results] == [0, 0], report(results)
    return [folder / name for name in NAMES]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return write_config(tmp_path_factory.mktemp("config"))


def test_from_one_program_to_islands_and_back_the_weights_are_those_of_one_program(config, tmp_path):
    whole = trained(config, "whole", *COMMON)
    run = shutil.copytree(whole, tmp_path / "run")
    cut(run, 8)
    roster = tmp_path / "roster.toml"
    islands = [
        f'[[island]]\nname = "{name}"\naddress = "127.0.0.1:{port}"\n'
        for name, port in zip(NAMES, free_ports(2), strict=True)
    ]
    roster.write_text('run = "test"\n' + "".join(islands))
    out = tmp_path / "islands"
    assert island.main(["scatter", f"--workdir={run}", f"--roster={roster}", f"--out={out}"]) == 0
    folders = train_islands(config, roster, out)
    for folder in folders:
        assert {path.name for path in (folder / "checkpoints").iterdir()} >= {"16", "24"}

    for at in (24, 16):  # where the islands have ended, and on the way
        for folder in folders:
            cut(folder, at)
        together = config.parent / f"together{at}"
        assert island.main(["gather", "--workdirs", *map(str, folders), f"--out={together}"]) == 0
        trained(config, together.name, *COMMON)
        found, expected = weights(together), weights(whole)
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=2e-5, err_msg=name)
        assert metrics(together)[-1]["perplexity"] == pytest.approx(metrics(whole)[-1]["perplexity"], rel=1e-4)
