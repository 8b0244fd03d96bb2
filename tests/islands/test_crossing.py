"""Real processes: a run of one program resumes as islands, and islands resume as a run of one program."""

import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from noloco_jax.island.command import main as island
from support.archipelago import Archipelago
from support.events import shown
from support.processes import environment, metrics, trained, weights, write_config

pytestmark = pytest.mark.timeout(900)

NAMES = ("paris", "berlin")
COMMON = ("--config.num_replicas=2", "--config.keep_checkpoints=9", "--config.checkpoint_every=8")


def rewind(workdir: Path, step: int) -> None:
    """Delete the checkpoints after `step`, as if the run had been stopped there."""
    for folder in (workdir / "checkpoints").iterdir():
        if folder.name.isdigit() and int(folder.name) > step:
            shutil.rmtree(folder)


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
    with Archipelago(folder, NAMES, [f"--config={config}", *COMMON], environment(config), waits=True) as islands:
        assert island(["scatter", f"--workdir={run}", f"--roster={folder / 'paris.toml'}", f"--out={folder}"]) == 0
        islands.train()
    return Crossed(config, whole, [islands.workdir(name) for name in NAMES])


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


def test_islands_resume_together_from_an_earlier_step(crossed, tmp_path):
    for folder in crossed.islands:
        shutil.copytree(folder, tmp_path / folder.name)
    every = [f"--config={crossed.config}", *COMMON, "--from_step=16"]
    with Archipelago(tmp_path, NAMES, every, environment(crossed.config), waits=True) as islands:
        islands.train()
    for name in NAMES:
        assert "resuming from the checkpoint of step 16 " in islands.said(name)
        aside = islands.workdir(name) / "checkpoints_set_aside"
        assert [path.name for path in aside.iterdir()] == ["24"]
        assert islands.step(name) == 24
        assert [line["round"] for line in islands.lines(name, "exchange") if line["outcome"] == "met"] == [2, 3, 4, 5]


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
            assert 0 <= line["steps_late"] < 20
            assert line["seconds_exposed"] > 0 and 0 < line["goodput"] <= 1
        there = {(step, tag) for step, tag, _ in shown(folder)}
        names = ("participation", "lag", "one_sided_commits", "seconds_exposed", "goodput")
        assert {(line["step"], f"exchange/{name}") for line in lines for name in names} <= there
