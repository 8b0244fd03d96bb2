"""Plots of a run's curves."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from noloco_jax.errors import UserError
from noloco_jax.metrics.curves import draw_on, plot_curves, running_mean
from noloco_jax.metrics.writer import MetricWriter, read_metrics


def run(workdir: Path, steps: int, replicas: int = 4, bad: float = 1.0, spread: float = 1e-3) -> Path:
    writer = MetricWriter(workdir, resume_step=None, tensorboard=False)
    for step in range(1, steps + 1):
        writer.write(step, "train", loss=bad * (1 + 1 / step), lr=1e-3)
        if step % 5 == 0:
            perplexities = [bad * (5.0 + index) for index in range(replicas)]
            writer.write(
                step,
                "eval",
                perplexity=float(np.mean(perplexities)),
                perplexity_replicas=perplexities,
                perplexity_merged=4.5,
                replica_spread=spread,
            )
    writer.close()
    return workdir


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


WHOLE = {"perplexity": 5.0, "perplexity_replicas": [5.0] * 8, "perplexity_merged": 4.0, "replica_spread": 1e-3}
FEWER = WHOLE | {"perplexity_replicas": [4.5] * 4}
ISLAND = {"island": "paris", "perplexity": 5.0}


@pytest.mark.parametrize(
    "figures",
    [
        {"steps": 1},
        {"steps": 120, "replicas": 16},
        {"steps": 20, "bad": 1e263},
        {"steps": 20, "spread": 0.0},
    ],
    ids=str,
)
def test_plot_curves_handles_runs_of_any_size_and_non_finite_values(tmp_path, figures):
    path = plot_curves(run(tmp_path, **figures))
    assert path == tmp_path / "curves.png" and is_picture(path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl"]


@pytest.mark.parametrize("evals", [(WHOLE, FEWER), (ISLAND, WHOLE), (WHOLE, ISLAND)], ids=["fewer", "one", "islands"])
def test_plot_curves_handles_a_run_that_resumed_with_fewer_replicas_or_in_another_mode(tmp_path, evals):
    with MetricWriter(tmp_path, resume_step=None, tensorboard=False) as writer:
        for step, values in enumerate(evals, start=1):
            writer.write(step, "eval", **values)
    assert is_picture(plot_curves(tmp_path))


def legends(metrics: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the legend labels of each panel, keyed by its title."""
    figure = Figure()
    kinds = ("train", "eval")
    draw_on(figure, *([entry for entry in metrics if entry["kind"] == kind] for kind in kinds))
    return {axes.get_title(): axes.get_legend_handles_labels()[1] for axes in figure.axes}


def test_the_plot_of_all_replicas_shows_the_merged_model_and_the_replica_spread(tmp_path):
    panels = legends(read_metrics(run(tmp_path, steps=150)))
    assert panels == {
        "Training loss": ["logged points", "mean of 3 logged points"],
        "Validation perplexity": ["each replica", "mean of the replicas", "merged model"],
        "Replica spread": [],
    }


def test_the_plot_of_an_island_omits_the_merged_model_and_the_replica_spread(tmp_path):
    lines = [line for line in read_metrics(run(tmp_path, steps=20)) if line["kind"] == "train"]
    lines += [{"step": 10, "kind": "eval", "island": "paris", "perplexity": 5.0}]
    assert legends(lines) == {"Training loss": ["logged points"], "Validation perplexity": ["island paris"]}


@pytest.mark.parametrize("island", [{}, {"island": "paris"}])
def test_the_plot_of_a_mixture_shows_each_source_of_the_last_evaluation(island):
    sources = [{"gone": 3.0}, {"web": 5.0, "step": 4.0}, {"web": None, "step": 3.0}]
    evals = [
        {"step": step, "kind": "eval", **WHOLE, **island, "perplexity_by_source": by_source}
        for step, by_source in enumerate(sources, start=1)
    ]
    assert legends(evals)["Validation perplexity"][-2:] == ["on web", "on step"]


@pytest.mark.parametrize("text", [None, "", '{"step": 1, "kind": "other"}\n'])
def test_a_run_with_nothing_to_draw_is_an_error(tmp_path, text):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError):
        plot_curves(tmp_path)


@pytest.mark.parametrize("window", [1, 2, 3, 5, 9])
def test_the_running_mean_averages_a_centered_window_without_nans(window):
    values = np.array([1.0, 4.0, np.nan, 2.0, 8.0, 3.0, np.nan])
    before, after = window // 2, (window - 1) // 2
    around = [values[max(0, i - before) : i + after + 1] for i in range(len(values))]
    expected = [np.mean(part[~np.isnan(part)]) if not np.isnan(part).all() else np.nan for part in around]
    np.testing.assert_allclose(running_mean(values, window), np.array(expected), rtol=1e-12)
