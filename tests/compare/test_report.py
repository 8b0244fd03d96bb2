"""Figures, table and charts of a comparison."""

import csv
import math
from dataclasses import replace

import numpy as np
import pytest

from noloco_jax.compare import report, results
from noloco_jax.compare.chart import draw, draw_bytes
from noloco_jax.compare.rows import make_rows, worths
from support.comparisons import finished, only, plan_of, train


def test_gaps_are_between_runs_of_the_same_seed_and_value(config_file, tmp_path):
    runs = plan_of(config_file, methods=["ddp", "noloco"], seeds=2, vary="num_replicas=2,4")
    ddp = {(7, "2"): 10.0, (8, "2"): 20.0, (7, "4"): 40.0, (8, "4"): 80.0}
    gaps = {(7, "2"): 1.05, (8, "2"): 1.07, (7, "4"): 0.9, (8, "4"): 0.8}
    for run in runs.runs:
        [(_, value)] = run.variant.values
        key = run.seed, value
        factor = gaps[key] if run.variant.method == "noloco" else 1
        train(run, tmp_path, perplexity=ddp[key] * factor, merged=2 * ddp[key] * factor)
    rows = {(row.variant.method, row.variant.values[0][1]): row.figures for row in make_rows(runs, tmp_path)}
    for name in ("gap_percent", "gap_merged_percent"):
        np.testing.assert_allclose(rows["noloco", "2"][name], [5, 7])
        np.testing.assert_allclose(rows["noloco", "4"][name], [-10, -20])
        np.testing.assert_array_equal(rows["ddp", "4"][name], [0, 0])


def test_a_ddp_run_that_ignores_the_varied_field_is_the_reference_of_all_values(config_file, tmp_path):
    runs = plan_of(config_file, methods=["ddp", "noloco"], vary="outer.sync_every=2,4")
    for run in runs.runs:
        train(run, tmp_path, perplexity={(): 10.0, ("2",): 11.0, ("4",): 12.0}[_values(run.variant)])
    rows = make_rows(runs, tmp_path)
    assert [(_values(row.variant), round(row.figures["gap_percent"][0], 6)) for row in rows] == [
        ((), 0),
        (("2",), 10),
        (("4",), 20),
    ]


def _values(variant):
    return tuple(value for _, value in variant.values)


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


def test_replicas_that_differ_only_by_rounding_have_no_spread(config_file, tmp_path):
    run = only(plan_of(config_file), "ddp")
    train(run, tmp_path, 5.0, spread=lambda lr: 1e-9)
    curve = results.read_curve(run, tmp_path)
    assert np.isnan(curve.spread).all()
    assert np.isnan(results.correlation(curve, 8))


def test_unfinished_runs_are_left_out_and_named(config_file, tmp_path):
    runs = plan_of(config_file)
    train(runs.runs[0], tmp_path, 5.0)
    train(runs.runs[1], tmp_path, 6.0, steps=36)
    rows = make_rows(runs, tmp_path)
    assert [row.label for row in rows] == ["ddp"]
    page = report.markdown(runs, rows, "command", {}, runs.runs[1:])
    assert "Not finished: diloco-seed7, noloco-seed7, local-seed7." in page


def test_the_table_has_mean_and_spread_over_seeds(config_file, tmp_path):
    runs = finished(config_file, tmp_path, methods=["ddp", "noloco"], seeds=2)  # ddp 5, noloco 6; ddp 7, noloco 8
    rows = make_rows(runs, tmp_path)
    table = [line for line in report.markdown(runs, rows, "command", {}, []).splitlines() if line.startswith("|")]
    gaps = np.array([100 / 5, 100 / 7])
    ddp, noloco = ([cell.strip() for cell in line.strip("|").split("|")] for line in table[2:])
    assert ddp[:5] == ["ddp", "2", "–", "6.00 ± 1.41", "+0.00"]
    assert ddp[9] == ddp[10] == "–"
    assert noloco[:4] == ["noloco", "2", "10", "7.00 ± 1.41"]
    assert noloco[4] == f"+{gaps.mean():.2f} ± {gaps.std(ddof=1):.2f}"
    assert noloco[10] == "1.000"
    (line, other) = csv.DictReader(report.table_csv(runs, rows).splitlines())
    assert (line["method"], other["method"]) == ("ddp", "noloco")
    assert float(other["gap_percent_mean"]) == pytest.approx(gaps.mean())
    assert float(other["gap_percent_std"]) == pytest.approx(gaps.std(ddof=1))
    assert line["replica_spread_mean"] == ""


def test_the_page_remarks_on_diloco_evaluated_only_after_outer_steps(config_file, tmp_path):
    plan = finished(config_file, tmp_path, methods=["diloco"])
    rows = make_rows(plan, tmp_path)
    for every, changes, remarked in (
        (4, {}, False),
        (8, {}, True),
        (8, {"fragments": 2}, False),
        (8, {"delay": 1}, False),
    ):
        [run] = plan.runs
        config = replace(run.config, eval_every=every, outer=replace(run.config.outer, **changes))
        altered = [replace(row, runs=(replace(run, config=config),)) for row in rows]
        page = report.markdown(plan, altered, "command", {}, [])
        assert ("right after outer steps alone" in page) == remarked


def test_a_row_shows_the_best_tuned_value_and_its_gap_to_the_tuned_reference(config_file, tmp_path):
    plan = plan_of(config_file, methods=["ddp", "noloco"], seeds=2, tune="inner.lr=0.01,0.02,0.04")
    perplexities = {
        "ddp": {"0.01": 10.0, "0.02": 8.0, "0.04": 9.0},
        "noloco": {"0.01": 13.0, "0.02": 12.0, "0.04": 11.0},
    }
    for run in plan.runs:  # all values of the other seed too, as if another had been the best
        assert run.tuned is not None
        train(run, tmp_path, perplexities[run.variant.method][run.tuned] * (1 if run.seed == 7 else 2))
    ddp, noloco = rows = make_rows(plan, tmp_path)
    assert (ddp.tuned, ddp.is_at_end, noloco.tuned, noloco.is_at_end) == ("0.02", False, "0.04", True)
    assert [run.seed for run in noloco.runs] == [7, 8]
    np.testing.assert_allclose(noloco.figures["gap_percent"], [37.5, 37.5])
    page = report.markdown(plan, rows, "command", {}, [])
    assert "| 0.04 (at the end) |" in page and "| 0.02 |" in page
    assert "Best at an end of the list of inner.lr, so extend --tune beyond it: noloco (0.04)." in page
    lines = list(csv.DictReader(report.table_csv(plan, rows).splitlines()))
    assert [(line["inner.lr"], line["tuned_at_end"]) for line in lines] == [("0.02", "false"), ("0.04", "true")]


def test_bytes_are_rated_by_their_gain_and_by_the_variant_that_dominates(config_file, tmp_path):
    variants = ["cheap:outer.lr=0.1", "middle:outer.lr=0.2", "bad:outer.lr=0.3", "other:inner.optimizer=muon"]
    plan = plan_of(config_file, methods=["ddp", "local"], variants=variants)
    left = {
        "ddp": (10.0, 1600.0),
        "local": (15.0, 0.0),
        "cheap": (14.0, 100.0),
        "middle": (12.0, 400.0),
        "bad": (13.0, 800.0),
        "other": (11.0, 100.0),  # best of all, but has no ddp to compare it with
    }
    for run in plan.runs:
        perplexity, sent = left[run.variant.title]
        train(run, tmp_path, perplexity, sent=sent)
    rows = make_rows(plan, tmp_path)
    worth = dict(zip((row.label for row in rows), worths(rows), strict=True))
    assert {label: w.beaten_by for label, w in worth.items()} == dict.fromkeys(left) | {"bad": "middle"}
    # Gaps of 40, 20 and 0 percent at 100, 400 and 1600 bytes.
    for label, cheaper in (("middle", "cheap"), ("ddp", "middle")):
        assert worth[label].cheaper == cheaper
        assert (worth[label].points, worth[label].times) == pytest.approx((20, 4))
    assert all(worth[label].cheaper is None for label in ("local", "cheap", "bad", "other"))
    table = report.table(plan, rows, brief=True)
    assert "| beaten by middle |" in table[6] and "| 1/4 | 20.0 points for 4 x the bytes of cheap |" in table[5]
    assert "There is no ddp with inner.optimizer='muon'" in report.markdown(plan, rows, "command", {}, [])


@pytest.mark.parametrize(
    "settings",
    [
        {"seeds": 3},
        {"methods": ["ddp"]},
        {"vary": ["num_replicas=2,4", "outer.sync_every=2,4"]},
        {"variants": ["a:outer.wire=int8", "b:inner.optimizer=muon"], "tune": "inner.lr=0.01,0.02"},
    ],
    ids=str,
)
def test_every_kind_of_comparison_draws_its_charts(config_file, tmp_path, settings):
    plan = finished(config_file, tmp_path / "out", **settings)
    rows = make_rows(plan, tmp_path / "out")
    draw(rows, tmp_path / "comparison.png")
    assert draw_bytes(rows, tmp_path / "bytes.png")
    for name in ("comparison.png", "bytes.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG") and (tmp_path / name).stat().st_size > 10_000
    assert not list(tmp_path.glob("*.tmp"))


def test_no_chart_of_bytes_is_drawn_without_a_reference(config_file, tmp_path):
    plan = finished(config_file, tmp_path / "out", methods=["noloco"])
    assert not draw_bytes(make_rows(plan, tmp_path / "out"), tmp_path / "bytes.png")
    assert not (tmp_path / "bytes.png").exists()


def test_a_diverged_seed_makes_its_methods_mean_and_gap_infinite(config_file, tmp_path):
    plan = plan_of(config_file, methods=["ddp", "noloco"], seeds=3)
    for run in plan.runs:
        last = math.inf if run.variant.method == "noloco" and run.seed == 8 else 10.0
        train(run, tmp_path, last, merged=last, sent=1600.0 if run.variant.method == "ddp" else 100.0)
    rows = make_rows(plan, tmp_path)
    page = report.markdown(plan, rows, "command", {}, [])
    [line] = [line for line in page.splitlines() if line.startswith("| noloco |")]
    assert line.count("inf (1 of 3)") == 4  # perplexity and gap, of the replicas and merged
    ddp, noloco = csv.DictReader(report.table_csv(plan, rows).splitlines())
    assert (ddp["perplexity_mean"], noloco["perplexity_mean"], noloco["gap_percent_mean"]) == ("10", "inf", "inf")
    assert draw_bytes(rows, tmp_path / "bytes.png")


def test_the_csv_has_the_interval_that_a_method_makes_of_sync_every(config_file, tmp_path):
    plan = plan_of(config_file, methods=["diloco", "noloco"], vary="outer.sync_every=2,3")
    for run in plan.runs:
        train(run, tmp_path, 10.0)
    lines = csv.DictReader(report.table_csv(plan, make_rows(plan, tmp_path)).splitlines())
    assert [(line["method"], line["outer.sync_every"]) for line in lines] == [
        *(("diloco", "4"), ("diloco", "6")),
        *(("noloco", "2"), ("noloco", "3")),
    ]


def test_a_share_is_written_without_an_exponent():
    assert [report.format_share(1 / x) for x in (2.34, 17, 184.4, 1234, 20000)] == [
        *("1/2.34", "1/17", "1/184"),
        *("1/1234", "1/20000"),
    ]
