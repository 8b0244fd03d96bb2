"""Power law of the gap: recovered from runs that follow it, absent where none does, and used for predictions."""

import numpy as np
import pytest

from noloco_jax.compare import report
from noloco_jax.compare.chart import draw_laws
from noloco_jax.compare.law import fit_laws, num_meetings
from noloco_jax.compare.rows import make_rows
from support.comparisons import plan_of, train

LENGTHS = "num_steps/eval_every=40/4,80/8"


def trained(config_file, tmp_path, gap, *overrides, without=(), every="2,4,8,20"):
    """Return plan and rows of runs whose gap in percent is `gap(meetings)`; runs named in `without` are not trained."""
    vary = (LENGTHS, f"outer.sync_every={every}")
    plan = plan_of(config_file, *overrides, methods=["ddp", "noloco"], vary=vary)
    for run in plan.runs:
        if run.name not in without:
            above = gap(num_meetings(run.config)) if run.variant.method == "noloco" else 0.0
            train(run, tmp_path, 10 * (1 + above / 100))
    return plan, make_rows(plan, tmp_path)


def test_a_power_law_is_recovered_from_runs_that_follow_it(config_file, tmp_path):
    _, rows = trained(config_file, tmp_path, lambda meetings: 3 * (meetings / 100) ** -0.7)
    (law,) = fit_laws(rows)
    assert (law.at_unit, law.power) == pytest.approx((3, 0.7), rel=1e-6)
    assert (law.power_error, law.worst) == pytest.approx((0, 1), abs=1e-6)


def test_meetings_of_a_weight_are_those_of_its_fragment(config_file, tmp_path):
    plan, _ = trained(config_file, tmp_path, float, "--config.outer.fragments=2", every="4")
    counts = {run.config.num_steps: num_meetings(run.config) for run in plan.runs if run.variant.method == "noloco"}
    assert counts == {40: 10, 80: 20}


def test_the_errors_are_those_of_linear_regression(config_file, tmp_path):
    noise = dict(zip((20, 10, 5, 2, 40, 4), (1.1, 0.9, 1.05, 0.95, 1.0, 1.2), strict=True))
    _, rows = trained(config_file, tmp_path, lambda meetings: noise[meetings] * 3 * (meetings / 100) ** -0.7)
    (law,) = fit_laws(rows)
    table = np.stack([np.ones(len(law.gaps)), np.log(law.meetings)], axis=1)
    found, (left,), *_ = np.linalg.lstsq(table, np.log(law.gaps))
    covariance = left / (len(table) - 2) * np.linalg.inv(table.T @ table)
    assert (law.power, law.power_error) == pytest.approx((-found[1], covariance[1, 1] ** 0.5))
    at = np.array([1.0, np.log(500)])
    gap, factor = law.predict(np.array(500.0))
    variance = left / (len(table) - 2) + at @ covariance @ at
    assert (gap, factor) == pytest.approx((np.exp(at @ found), np.exp(variance**0.5)))


@pytest.mark.parametrize(
    ("gap", "every"),
    [
        (lambda meetings: -1.0, "2,4,8,20"),
        (lambda meetings: meetings, "2,4,8,20"),
        (lambda meetings: 1 / meetings, "4"),
    ],
    ids=["no gap", "one that grows", "too few points"],
)
def test_no_law_is_fitted_to_runs_that_follow_none(config_file, tmp_path, gap, every):
    _, rows = trained(config_file, tmp_path, gap, every=every)
    assert fit_laws(rows) == []
    assert not draw_laws(rows, [], tmp_path / "law.png")


def test_the_page_predicts_the_gap_of_unfinished_runs(config_file, tmp_path):
    name = "noloco-num_steps=80-outer.sync_every=2"
    plan, rows = trained(config_file, tmp_path, lambda n: 3 * (n / 100) ** -0.5, without=[f"{name}-seed7"])
    laws = fit_laws(rows)
    page = report.markdown(plan, rows, "command", {}, [], laws)
    assert "gap = 3 % x (meetings of a weight / 100)^-b with b = 0.50 ± 0.00, fitted to 7 rows" in page
    assert (
        "Expected by that, with an error of 1 sigma: noloco-num_steps=80-outer.sync_every=2: +4.7 % (4.7 to 4.7)."
        in page
    )
    assert draw_laws(rows, laws, tmp_path / "law.png") and (tmp_path / "law.png").stat().st_size > 10_000


def test_variants_that_differ_in_more_than_meetings_get_separate_laws(config_file, tmp_path):
    vary = ("outer.sync_every=1,2,4,8", "num_replicas=2,4")
    plan = plan_of(config_file, methods=["ddp", "noloco"], vary=vary)
    for run in plan.runs:
        power = {2: 0.5, 4: 0.9}[run.config.num_replicas]
        above = num_meetings(run.config) ** -power if run.variant.method == "noloco" else 0.0
        train(run, tmp_path, 10 * (1 + above))
    assert [law.power for law in fit_laws(make_rows(plan, tmp_path))] == pytest.approx([0.5, 0.9])


def test_a_warmup_that_varies_by_itself_gets_separate_laws(config_file, tmp_path):
    vary = ("outer.sync_every=1,2,4,8", "inner.warmup_steps=1,2")
    plan = plan_of(config_file, methods=["ddp", "noloco"], vary=vary)
    for run in plan.runs:
        power = {1: 0.5, 2: 0.9}[run.config.inner.warmup_steps]
        above = num_meetings(run.config) ** -power if run.variant.method == "noloco" else 0.0
        train(run, tmp_path, 10 * (1 + above))
    assert [law.power for law in fit_laws(make_rows(plan, tmp_path))] == pytest.approx([0.5, 0.9])


def test_no_law_is_fitted_over_intervals_that_bring_another_wire_format_with_them(config_file, tmp_path):
    vary = "outer.sync_every/outer.wire=1/int4,2/int4,4/int8,8/float32"
    plan = plan_of(config_file, methods=["ddp", "noloco"], vary=vary)
    for run in plan.runs:
        above = num_meetings(run.config) ** -0.5 if run.variant.method == "noloco" else 0.0
        train(run, tmp_path, 10 * (1 + above))
    assert fit_laws(make_rows(plan, tmp_path)) == []


def test_laws_of_one_variant_are_told_apart_by_its_other_varied_fields(config_file, tmp_path):
    plan = plan_of(
        config_file, methods=["ddp", "noloco"], vary=("inner.optimizer=adam,muon", "outer.sync_every=1,2,4,8")
    )
    for run in plan.runs:
        is_reference, power = run.variant.method == "ddp", 0.5 if run.config.inner.optimizer == "adam" else 0.9
        train(run, tmp_path, 10.0 if is_reference else 10 + num_meetings(run.config) ** -power)
    laws = fit_laws(make_rows(plan, tmp_path))
    titles = [f"noloco inner.optimizer={optimizer}" for optimizer in ("adam", "muon")]
    assert [str(law).partition(":")[0] for law in laws] == titles
    assert [law.power for law in laws] == pytest.approx([0.5, 0.9])
