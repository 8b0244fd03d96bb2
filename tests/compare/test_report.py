"""Figures, table and picture of a comparison."""

import math

import numpy as np
import pytest

from noloco_jax.tools.compare import report
from noloco_jax.tools.compare.report import ComparisonRow, make_rows, results_of
from support.comparisons import finished, only, plan_of, train


def rows_of(plan, workdir) -> list[ComparisonRow]:
    return make_rows(plan, results_of(plan.runs, workdir))


def cells(plan, rows) -> list[list[str]]:
    lines = [line for line in report.markdown(plan, rows, "command", []).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_gaps_are_between_runs_of_the_same_seed_and_value(config_file, tmp_path):
    plan = plan_of(config_file, methods=["ddp", "noloco"], seeds=2, vary="num_replicas=2,4")
    ddp = {(7, "2"): 10.0, (8, "2"): 20.0, (7, "4"): 40.0, (8, "4"): 80.0}
    gaps = {(7, "2"): 1.05, (8, "2"): 1.07, (7, "4"): 0.9, (8, "4"): 0.8}
    for run in plan.runs:
        [(_, (value,))] = run.variant.varied
        factor = gaps[run.seed, value] if run.variant.method == "noloco" else 1
        perplexity = ddp[run.seed, value] * factor
        train(run, tmp_path, perplexity=perplexity, merged=2 * perplexity)
    rows = {row.variant.name: row.figures for row in rows_of(plan, tmp_path)}
    for name in ("gap_percent", "gap_merged_percent"):
        np.testing.assert_allclose(rows["noloco-num_replicas=2"][name], [5, 7])
        np.testing.assert_allclose(rows["noloco-num_replicas=4"][name], [-10, -20])
        np.testing.assert_array_equal(rows["ddp-num_replicas=4"][name], [0, 0])


def test_a_ddp_run_that_ignores_the_varied_field_is_the_reference_of_all_values(config_file, tmp_path):
    plan = plan_of(config_file, methods=["ddp", "noloco"], vary="outer.sync_every=2,4")
    for run, perplexity in zip(plan.runs, (10.0, 11.0, 12.0), strict=True):
        train(run, tmp_path, perplexity)
    gaps = [row.figures["gap_percent"][0] for row in rows_of(plan, tmp_path)]
    assert gaps == pytest.approx([0, 10, 20])


def test_replicas_that_differ_only_by_rounding_have_no_spread(config_file, tmp_path):
    plan = plan_of(config_file, methods=["ddp"])
    train(only(plan, "ddp"), tmp_path, 5.0, spread=lambda lr: 1e-9)
    assert cells(plan, rows_of(plan, tmp_path))[0][-1] == "–"


def test_unfinished_runs_are_left_out_and_named(config_file, tmp_path):
    plan = plan_of(config_file)
    train(plan.runs[0], tmp_path, 5.0)
    train(plan.runs[1], tmp_path, 6.0, steps=36)
    rows = rows_of(plan, tmp_path)
    assert [row.variant.name for row in rows] == ["ddp"]
    page = report.markdown(plan, rows, "command", plan.runs[1:])
    assert "Not finished: diloco-seed7, noloco-seed7, local-seed7." in page


def test_the_table_has_mean_and_deviation_over_seeds(config_file, tmp_path):
    plan = finished(config_file, tmp_path, methods=["ddp", "noloco"], seeds=2)  # ddp 5, noloco 6; ddp 7, noloco 8
    rows = rows_of(plan, tmp_path)
    gaps = np.array([100 / 5, 100 / 7])
    ddp, noloco = cells(plan, rows)
    assert ddp[:5] == ["ddp", "2", "–", "6.00 ± 1.41", "+0.00"]
    assert noloco[:4] == ["noloco", "2", "10", "7.00 ± 1.41"]
    assert noloco[4] == f"+{gaps.mean():.2f} ± {gaps.std(ddof=1):.2f}"
    assert ddp[-1] == "–" != noloco[-1]


def test_a_row_shows_the_best_tuned_value_and_its_gap_to_the_tuned_reference(config_file, tmp_path):
    plan = plan_of(config_file, methods=["ddp", "noloco"], seeds=2, tune="inner.lr=0.01,0.02,0.04")
    perplexities = {
        "ddp": {"0.01": 10.0, "0.02": 8.0, "0.04": 9.0},
        "noloco": {"0.01": 13.0, "0.02": 12.0, "0.04": 11.0},
    }
    for run in plan.runs:  # all values of the other seed too, as if another had been the best
        assert run.tuned is not None
        train(run, tmp_path, perplexities[run.variant.method][run.tuned] * (1 if run.seed == 7 else 2))
    _, noloco = rows = rows_of(plan, tmp_path)
    assert [run.seed for run in noloco.runs] == [7, 8]
    np.testing.assert_allclose(noloco.figures["gap_percent"], [37.5, 37.5])
    assert [line[1] for line in cells(plan, rows)] == ["0.02", "0.04 (at the end)"]
    page = report.markdown(plan, rows, "command", [])
    assert "Best at an end of the list of inner.lr, so extend --tune beyond it: noloco (0.04)." in page


def test_a_variant_without_a_ddp_of_its_inner_optimizer_has_no_gap_and_a_remark(config_file, tmp_path):
    plan = finished(config_file, tmp_path, methods=["ddp"], variants=["other:inner.optimizer=muon"])
    rows = rows_of(plan, tmp_path)
    assert cells(plan, rows)[1][4] == "–"
    assert "There is no ddp with inner.optimizer='muon'" in report.markdown(plan, rows, "command", [])


@pytest.mark.parametrize(
    "settings",
    [
        {"seeds": 3},
        {"methods": ["noloco"]},
        {"vary": ["num_replicas=2,4", "outer.sync_every=2,4"]},
        {"variants": ["a:outer.wire=int8", "b:inner.optimizer=muon"], "tune": "inner.lr=0.01,0.02"},
    ],
    ids=str,
)
def test_every_kind_of_comparison_is_drawn(config_file, tmp_path, settings):
    plan = finished(config_file, tmp_path / "out", **settings)
    report.draw_comparison(rows_of(plan, tmp_path / "out"), tmp_path / "comparison.png")
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_a_diverged_seed_makes_its_methods_mean_and_gap_infinite(config_file, tmp_path):
    plan = plan_of(config_file, methods=["ddp", "noloco"], seeds=3)
    for run in plan.runs:
        last = math.inf if run.variant.method == "noloco" and run.seed == 8 else 10.0
        train(run, tmp_path, last, merged=last, sent=1600.0 if run.variant.method == "ddp" else 100.0)
    rows = rows_of(plan, tmp_path)
    assert cells(plan, rows)[1].count("inf (1 of 3)") == 4  # perplexity and gap, of the replicas and merged
    report.draw_comparison(rows, tmp_path / "comparison.png")


def test_a_share_is_written_without_an_exponent():
    assert [report.format_share(1 / x) for x in (2.34, 17, 184.4, 1234, 20000)] == [
        *("1/2.34", "1/17", "1/184"),
        *("1/1234", "1/20000"),
    ]
