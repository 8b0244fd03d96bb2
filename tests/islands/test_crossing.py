"""Real processes: a run of one program resumes as islands, and islands resume as a run of one program."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from noloco_jax.island.command import main as island
from support import warm
from support.events import shown
from support.paths import ROOT
from support.ports import free_ports
from support.processes import environment, finish, metrics, report, trained, weights, write_config

pytestmark = pytest.mark.timeout(900)

NAMES = ("paris", "berlin")
COMMON = ("--config.num_replicas=2", "--config.keep_checkpoints=9", "--config.checkpoint_every=8")


def rewind(workdir: Path, step: int) -> None:
    """Delete the checkpoints after `step`, as if the run had been stopped there."""
    for folder in (workdir / "checkpoints").iterdir():
        if folder.name.isdigit() and int(folder.name) > step:
            shutil.rmtree(folder)


def write_roster(folder: Path) -> Path:
    """Write a roster of both islands; return its path."""
    roster = folder / "roster.toml"
    islands = [
        f'[[island]]\nname = "{name}"\naddress = "127.0.0.1:{port}"\n'
        for name, port in zip(NAMES, free_ports(2), strict=True)
    ]
    roster.write_text('run = "test"\n' + "".join(islands))
    return roster


def train_islands(config: Path, roster: Path, folder: Path, *options: str) -> list[Path]:
    """Train both islands to the end, waiting for every exchange; return their folders."""
    processes = [
        warm.Popen(
            [
                *(sys.executable, "-m", "support.waiting", f"--config={config}", f"--roster={roster}"),
                *(f"--name={name}", f"--workdir={folder / name}", *COMMON, *options),
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
    for name, (_, output) in zip(NAMES, results, strict=True):
        (folder / f"{name}.log").write_text(output)
    return [folder / name for name in NAMES]


class Crossed(NamedTuple):
    """Workdirs of a run of one program (`whole`), and of the islands that resumed from its step 8."""

    config: Path
    whole: Path
    islands: list[Path]


@pytest.fixture(scope="module")
def crossed(tmp_path_factory) -> Crossed:
    folder = tmp_path_factory.mktemp("crossed")
    config = write_config(tmp_path_factory.mktemp("config"))
    whole = trained(config, "whole", *COMMON)
    run = shutil.copytree(whole, folder / "run")
    rewind(run, 8)
    roster = write_roster(folder)
    out = folder / "islands"
    assert island(["scatter", f"--workdir={run}", f"--roster={roster}", f"--out={out}"]) == 0
    return Crossed(config, whole, train_islands(config, roster, out))


@pytest.mark.parametrize("step", [24, 16], ids=["at-the-end", "on-the-way"])
def test_scattering_to_islands_and_gathering_again_matches_one_program(crossed, tmp_path, step):
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in crossed.islands]
    for folder in folders:
        rewind(folder, step)
    together = crossed.config.parent / f"together{step}"
    assert island(["gather", "--workdirs", *map(str, folders), f"--out={together}"]) == 0
    trained(crossed.config, together.name, *COMMON)
    found, expected = weights(together), weights(crossed.whole)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=2e-5, err_msg=name)
    perplexity = metrics(crossed.whole)[-1]["perplexity"]
    assert metrics(together)[-1]["perplexity"] == pytest.approx(perplexity, rel=1e-4)


def test_islands_that_exchange_few_bits_often_match_one_program(tmp_path):
    """Allow for rounding: a value close to the middle between two codes may be sent as either."""
    best = {"wire": "modulo4", "fragments": 8, "order": "hypercube", "momentum": 0.3, "momentum_of": "corrections"}
    options = [f"--config.outer.{name}={value}" for name, value in {**best, "lr": 1.0, "sync_every": 8}.items()]
    config = write_config(tmp_path)
    expected = weights(trained(config, "whole", *COMMON, *options))
    folders = train_islands(config, write_roster(tmp_path), tmp_path, *options)
    for replica, folder in enumerate(folders):
        lines = [line for line in metrics(folder) if line["kind"] == "exchange"]
        assert len(lines) == 24 and {line["outcome"] for line in lines} == {"met"}
        for name, found in weights(folder).items():
            one, other = expected[name]
            replica_distance = np.sqrt(np.mean(np.square(one - other)))
            assert np.sqrt(np.mean(np.square(found[0] - expected[name][replica]))) <= 0.2 * replica_distance > 0, name


def test_an_islands_evaluation_reports_only_its_own_perplexity_under_its_name(crossed):
    for name, folder in zip(NAMES, crossed.islands, strict=True):
        *_, line = [line for line in metrics(folder) if line["kind"] == "eval"]
        figures = line.keys() - {"step", "kind", "tokens", "seconds", "time"}
        assert (figures, line["island"]) == ({"island", "perplexity"}, name)
        tags = {tag for _, tag, _ in shown(folder) if tag.startswith("eval/")}
        assert tags == {"eval/perplexity", "eval/tokens", "eval/seconds"}
        log = (folder.parent / f"{name}.log").read_text()
        assert f"perplexity {line['perplexity']:.3f} of island {name}\n" in log
        assert f"│ island {name}" in log
        for word in ("replica 0", "replicas", "merged", "spread"):
            assert word not in log[log.index(" of island ") :], word


def test_metrics_and_tensorboard_record_every_exchange(crossed):
    for folder in crossed.islands:
        lines = [line for line in metrics(folder) if line["kind"] == "exchange"]
        assert [line["round"] for line in lines] == [2, 3, 4, 5]
        for number, line in enumerate(lines, start=1):
            assert (line["outcome"], line["lag"], line["one_sided"], line["one_sided_commits"]) == ("met", 0, False, 0)
            assert (line["participation"], line["committed"], line["due"]) == (1, number, number)
            assert line["seconds_exposed"] > 0 and 0 < line["goodput"] <= 1
        there = {(step, tag) for step, tag, _ in shown(folder)}
        names = ("participation", "lag", "one_sided_commits", "seconds_exposed", "goodput")
        assert {(line["step"], f"exchange/{name}") for line in lines for name in names} <= there
