"""What a comparison measures of its runs, its table and its picture."""

import csv
from dataclasses import replace

import numpy as np
import pytest

from noloco_jax.compare import report, results
from noloco_jax.compare.chart import draw
from support.comparisons import finished, only, plan_of, train


def test_gaps_are_between_runs_of_the_same_seed_and_value(config_file, tmp_path):
    runs = plan_of(config_file, methods=["ddp", "noloco"], seeds=2, vary="num_replicas=2,4")
    ddp = {(7, "2"): 10.0, (8, "2"): 20.0, (7, "4"): 40.0, (8, "4"): 80.0}
    gaps = {(7, "2"): 1.05, (8, "2"): 1.07, (7, "4"): 0.9, (8, "4"): 0.8}
    for run in runs:
        assert run.value is not None
        key = run.seed, run.value
        factor = gaps[key] if run.method == "noloco" else 1
        train(run, tmp_path, perplexity=ddp[key] * factor, merged=2 * ddp[key] * factor)
    rows = {(row.method, row.value): row.figures for row in results.make_rows(runs, tmp_path)}
    for name in ("gap_percent", "gap_merged_percent"):
        np.testing.assert_allclose(rows["noloco", "2"][name], [5, 7])
        np.testing.assert_allclose(rows["noloco", "4"][name], [-10, -20])
        np.testing.assert_array_equal(rows["ddp", "4"][name], [0, 0])


def test_a_ddp_run_that_the_field_does_not_matter_to_serves_all_values(config_file, tmp_path):
    runs = plan_of(config_file, methods=["ddp", "noloco"], vary="outer.sync_every=2,4")
    for run in runs:
        train(run, tmp_path, perplexity={None: 10.0, "2": 11.0, "4": 12.0}[run.value])
    rows = results.make_rows(runs, tmp_path)
    assert [(row.value, round(row.figures["gap_percent"][0], 6)) for row in rows] == [(None, 0), ("2", 10), ("4", 20)]


def test_correlation_is_pearsons_after_the_warmup(config_file, tmp_path):
    run = only(plan_of(config_file), "noloco")
    noise = iter(np.random.default_rng(0).uniform(0.1, 0.2, 10))
    train(run, tmp_path, 5.0, spread=lambda lr: lr * next(noise))
    curve = results.read_curve(run, tmp_path)
    steps = np.arange(4, 41, 4)
    np.testing.assert_array_equal(curve.steps, steps)
    np.testing.assert_array_equal(curve.tokens, steps * 4 * 2 * 16)
    progress = (steps[2:] - 1 - 8) / 32  # the warmup is 8 steps
    lr = 1e-3 + 9e-3 * 0.5 * (1 + np.cos(np.pi * progress))
    np.testing.assert_allclose(curve.lr[2:], lr, rtol=1e-5)
    spread = lr * np.random.default_rng(0).uniform(0.1, 0.2, 10)[2:]
    (x, y) = lr - lr.mean(), spread - spread.mean()
    assert results.correlation(curve, 8) == pytest.approx((x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum()))


def test_replicas_that_rounding_alone_sets_apart_have_no_spread(config_file, tmp_path):
    run = only(plan_of(config_file), "ddp")
    train(run, tmp_path, 5.0, spread=lambda lr: 1e-9)
    curve = results.read_curve(run, tmp_path)
    assert np.isnan(curve.spread).all()
    assert np.isnan(results.correlation(curve, 8))


def test_unfinished_runs_are_left_out_and_named(config_file, tmp_path):
    runs = plan_of(config_file)
    train(runs[0], tmp_path, 5.0)
    train(runs[1], tmp_path, 6.0, steps=36)
    rows = results.make_rows(runs, tmp_path)
    assert [row.method for row in rows] == ["ddp"]
    page = report.markdown(rows, None, "command", None, runs[1:])
    assert "Not finished: diloco-seed7, noloco-seed7, local-seed7." in page


def test_the_table_has_mean_and_spread_over_seeds(config_file, tmp_path):
    runs = finished(config_file, tmp_path, methods=["ddp", "noloco"], seeds=2)  # ddp 5, noloco 6; ddp 7, noloco 8
    rows = results.make_rows(runs, tmp_path)
    table = [line for line in report.markdown(rows, None, "command", "x.png", []).splitlines() if line.startswith("|")]
    gaps = np.array([100 / 5, 100 / 7])
    ddp, noloco = ([cell.strip() for cell in line.strip("|").split("|")] for line in table[2:])
    assert ddp[:5] == ["ddp", "2", "–", "6.00 ± 1.41", "+0.00"]
    assert ddp[7] == ddp[9] == "–"
    assert noloco[:4] == ["noloco", "2", "10", "7.00 ± 1.41"]
    assert noloco[4] == f"+{gaps.mean():.2f} ± {gaps.std(ddof=1):.2f}"
    assert noloco[9] == "1.000"
    (line, other) = csv.DictReader(report.table_csv(rows, None).splitlines())
    assert (line["method"], other["method"]) == ("ddp", "noloco")
    assert float(other["gap_percent_mean"]) == pytest.approx(gaps.mean())
    assert float(other["gap_percent_std"]) == pytest.approx(gaps.std(ddof=1))
    assert line["replica_spread_mean"] == ""


def test_diloco_that_is_evaluated_after_outer_steps_alone_is_remarked(config_file, tmp_path):
    for every, remarked in ((4, False), (8, True)):
        runs = finished(config_file, tmp_path / str(every), methods=["diloco"])
        runs = [replace(run, config=replace(run.config, eval_every=every)) for run in runs]
        page = report.markdown(results.make_rows(runs, tmp_path / str(every)), None, "command", None, [])
        assert ("right after outer steps alone" in page) == remarked


@pytest.mark.parametrize(
    "settings",
    [{}, {"seeds": 3}, {"methods": ["ddp"]}, {"vary": "outer.sync_every=2,4"}, {"vary": "num_replicas=2,4"}],
    ids=str,
)
def test_any_comparison_gives_a_picture(config_file, tmp_path, settings):
    runs = finished(config_file, tmp_path / "out", **settings)
    path = tmp_path / "comparison.png"
    draw(results.make_rows(runs, tmp_path / "out"), "a field", path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    assert not list(tmp_path.glob("*.tmp"))
