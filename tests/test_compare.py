"""The comparison of methods: its runs, their figures, the table and the picture, and what stops and goes on."""

import csv
import fcntl
import json
import runpy
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import processes
import pytest

from noloco_jax import compare
from noloco_jax.comparison import figures, report
from noloco_jax.comparison.picture import draw
from noloco_jax.comparison.plan import Run, make_plan, parse_settings, parse_vary
from noloco_jax.config import save_config, to_dict
from noloco_jax.errors import UserError, main_with_errors
from noloco_jax.metrics import MetricWriter
from noloco_jax.parallel.optimizers import learning_rates
from noloco_jax.stopping import RESTART

METHODS = ["ddp", "diloco", "noloco", "local"]
CONFIG = """
from ml_collections import ConfigDict


def get_config(method="noloco"):
    config = ConfigDict({{
        "method": method, "num_steps": 40, "eval_every": 4, "num_replicas": 4, "seed": 7,
        "model": {{"hidden_size": 8, "intermediate_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}},
        "inner": {{"lr": 1e-2, "warmup_steps": 8}},
        "outer": {{"sync_every": 4, "lr": 0.6, "momentum": 0.4}},
        "data": {{"path": {data!r}, "sequence_length": 16, "batch_size": 2}},
    }})
    config.inner.min_lr = config.inner.get_oneway_ref("lr") / 10
    return config
"""
# embedding and head, norms, attention (q, k, v, o), the MLP's three
NUM_PARAMS = 2 * 259 * 8 + (2 * 2 + 1) * 8 + 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8) + 2 * 3 * 8 * 16


@pytest.fixture
def config_file(tmp_path) -> str:
    (tmp_path / "data").mkdir()
    for number in range(100):
        (tmp_path / "data" / f"{number:03}.txt").write_text("a few words " * 9)
    path = tmp_path / "config.py"
    path.write_text(CONFIG.format(data=str(tmp_path / "data")))
    return str(path)


def plan_of(config_file: str, *overrides: str, methods=METHODS, seeds=1, vary=None, settings=()) -> list[Run]:
    return make_plan(
        config_file,
        overrides,
        methods,
        seeds,
        parse_vary(vary) if vary else None,
        parse_settings(settings, methods),
    )


def only(runs: list[Run], method: str) -> Run:
    (run,) = (run for run in runs if run.method == method)
    return run


def train(run: Run, workdir: Path, perplexity: float, merged: float = 5.0, spread=lambda lr: 0.1 * lr, steps=None):
    """What a run of the trainer leaves: its last evaluation has the perplexities, the others more."""
    save_config(run.config, workdir / run.name)
    writer = MetricWriter(workdir / run.name, resume_step=None, tensorboard=False)
    lr = learning_rates(run.config)
    for step in range(4, (steps or run.config.num_steps) + 1, 4):
        excess = (run.config.num_steps - step) / 4
        writer.write(
            step,
            "eval",
            perplexity=perplexity + excess,
            perplexity_replicas=[perplexity + excess] * run.config.num_replicas,
            perplexity_merged=merged + excess,
            replica_spread=float(spread(lr[step - 1])),
        )
    writer.close()


def arguments(config_file: str, workdir: Path, *others: str) -> list[str]:
    return [f"--config={config_file}", f"--workdir={workdir}", *others]


# Which runs


def test_the_runs_of_a_seed_differ_in_method_and_outer_step_alone(config_file):
    for seed in (7, 8):
        runs = [run for run in plan_of(config_file, seeds=2) if run.seed == seed]
        assert [run.method for run in runs] == METHODS
        first = runs[0].config
        for run in runs:
            assert replace(run.config, method=first.method, outer=first.outer) == first
            assert run.config.seed == seed and run.config.method == run.method
            assert run.name == f"{run.method}-seed{seed}"


def test_diloco_has_the_papers_settings_beside_nolocos(config_file):
    runs = plan_of(config_file)
    noloco, diloco = only(runs, "noloco").config.outer, only(runs, "diloco").config.outer
    assert (noloco.lr, noloco.momentum, noloco.sync_every) == (0.6, 0.4, 4)
    assert (diloco.lr, diloco.momentum, diloco.sync_every) == (0.7, 0.3, 8)
    paper = runpy.run_path(str(processes.ROOT / "configs/paper.py"))["OUTER"]
    assert paper["diloco"] == (diloco.lr, diloco.momentum, paper["noloco"][2] * diloco.sync_every // noloco.sync_every)


def test_set_changes_one_method_over_all_else(config_file):
    settings = ["diloco:outer.sync_every=5", "diloco:outer.momentum=0.9", "ddp:inner.lr=0.03"]
    runs = plan_of(config_file, "--config.outer.momentum=0.2", vary="outer.sync_every=2,3", settings=settings)
    assert [run.config.outer.sync_every for run in runs if run.method == "noloco"] == [2, 3]
    diloco, ddp = only(runs, "diloco"), only(runs, "ddp")
    assert (diloco.config.outer.sync_every, diloco.config.outer.momentum) == (5, 0.9)
    assert (ddp.config.inner.lr, ddp.config.inner.min_lr) == (0.03, 0.003)
    assert [run.config.outer.momentum for run in runs if run.method == "noloco"] == [0.2, 0.2]


def test_a_value_makes_a_run_of_every_method_that_it_matters_to(config_file):
    names = {run.name: run for run in plan_of(config_file, vary="outer.sync_every=5,10")}
    assert list(names) == [
        "ddp-seed7",
        "diloco-outer.sync_every=5-seed7",
        "diloco-outer.sync_every=10-seed7",
        "noloco-outer.sync_every=5-seed7",
        "noloco-outer.sync_every=10-seed7",
        "local-seed7",
    ]
    assert names["diloco-outer.sync_every=5-seed7"].config.outer.sync_every == 10
    assert names["noloco-outer.sync_every=5-seed7"].config.outer.sync_every == 5
    assert len(plan_of(config_file, vary="outer.consensus=0.5,0.6")) == 5
    assert len(plan_of(config_file, vary="num_replicas=2,4")) == 8


def test_fields_that_refer_to_a_varied_one_follow_it(config_file):
    assert [run.config.inner.min_lr for run in plan_of(config_file, methods=["noloco"], vary="inner.lr=0.02,0.05")] == [
        0.002,
        0.005,
    ]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--methods=ddp,nolocco"], ["--methods=ddp,nolocco", "'nolocco'", "did you mean 'noloco'"]),
        (["--methods=ddp,ddp"], ["ddp 2 times"]),
        (["--seeds=0"], ["--seeds=0"]),
        (["--vary=outer.sync_evry=5"], ["unknown config field 'outer.sync_evry'", "did you mean 'outer.sync_every'"]),
        (["--vary=outer.sync_every"], ["FIELD=VALUE"]),
        (["--vary=outer.sync_every=5,5"], ["twice"]),
        (["--vary=outer.sync_every=5,x"], ["outer.sync_every", "int"]),
        (["--vary=seed=5,6"], ["--seeds"]),
        (["--set=outer.lr=5"], ["METHOD:FIELD=VALUE"]),
        (["--set=fsdp:outer.lr=5"], ["'fsdp'", "--methods"]),
        (["--set=diloco:outer.lrr=5"], ["unknown config field 'outer.lrr'"]),
        (["--set=diloco:method=ddp"], ["--methods"]),
        (["--config.method=ddp"], ["method='ddp'", "noloco"]),
        (["--config.outer.group_size=9"], ["outer.group_size=9", "num_replicas=4"]),
        (["--config.data.path=/nowhere"], ["/nowhere"]),
        (["--workdr=x"], ["--workdr", "did you mean '--workdir'"]),
    ],
)
def test_bad_input_is_an_error_of_one_line_before_anything_is_written(config_file, tmp_path, flags, named):
    with pytest.raises(UserError) as raised:
        compare.main(arguments(config_file, tmp_path / "out", *flags))
    message = str(raised.value)
    assert all(part in message for part in named) and "\n" not in message
    assert not (tmp_path / "out").exists()


def test_a_user_error_exits_with_2(config_file, tmp_path, capsys):
    with pytest.raises(SystemExit) as raised:
        main_with_errors(lambda: compare.main(arguments(config_file, tmp_path / "out", "--methods=x")))
    assert raised.value.code == 2
    assert capsys.readouterr().err.startswith("error: --methods=x")


def test_a_dry_run_lists_the_runs_and_writes_nothing(config_file, tmp_path, capsys):
    assert compare.main(arguments(config_file, tmp_path / "out", "--dry_run", "--seeds=2")) == 0
    output = capsys.readouterr().out
    assert all(f"{method}-seed{seed} (to do)" in output for method in METHODS for seed in (7, 8))
    assert not (tmp_path / "out").exists()


def test_the_folder_of_another_comparison_is_refused(config_file, tmp_path):
    out = tmp_path / "out"
    for run in plan_of(config_file, methods=["ddp", "noloco"]):
        train(run, out, perplexity=6.0)
    for flags, named in [
        (["--methods=ddp"], "noloco-seed7"),
        (["--methods=ddp,noloco", "--config.inner.lr=0.02"], "inner.lr=0.01 and this one 0.02"),
        (["--methods=ddp,noloco", "--config.seed=0"], "ddp-seed7"),
    ]:
        with pytest.raises(UserError, match="another comparison") as raised:
            compare.main(arguments(config_file, out, "--dry_run", *flags))
        assert named in str(raised.value)
    with pytest.raises(UserError, match="workdir of a run"):
        compare.main(arguments(config_file, out / "ddp-seed7", "--dry_run"))
    more = ["--methods=noloco,ddp,local", "--seeds=3", "--config.checkpoint_every=3", "--config.log_every=1"]
    assert compare.main(arguments(config_file, out, "--dry_run", *more)) == 0


# What is measured


def test_gaps_are_between_runs_of_the_same_seed_and_value(config_file, tmp_path):
    runs = plan_of(config_file, methods=["ddp", "noloco"], seeds=2, vary="num_replicas=2,4")
    ddp = {(7, "2"): 10.0, (8, "2"): 20.0, (7, "4"): 40.0, (8, "4"): 80.0}
    gaps = {(7, "2"): 1.05, (8, "2"): 1.07, (7, "4"): 0.9, (8, "4"): 0.8}
    for run in runs:
        assert run.value is not None
        key = run.seed, run.value
        factor = gaps[key] if run.method == "noloco" else 1
        train(run, tmp_path, perplexity=ddp[key] * factor, merged=2 * ddp[key] * factor)
    rows = {(row.method, row.value): row.figures for row in figures.make_rows(runs, tmp_path)}
    for name in ("gap_percent", "gap_merged_percent"):
        np.testing.assert_allclose(rows["noloco", "2"][name], [5, 7])
        np.testing.assert_allclose(rows["noloco", "4"][name], [-10, -20])
        np.testing.assert_array_equal(rows["ddp", "4"][name], [0, 0])


def test_a_ddp_run_that_the_field_does_not_matter_to_serves_all_values(config_file, tmp_path):
    runs = plan_of(config_file, methods=["ddp", "noloco"], vary="outer.sync_every=2,4")
    for run in runs:
        train(run, tmp_path, perplexity={None: 10.0, "2": 11.0, "4": 12.0}[run.value])
    rows = figures.make_rows(runs, tmp_path)
    assert [(row.value, round(row.figures["gap_percent"][0], 6)) for row in rows] == [(None, 0), ("2", 10), ("4", 20)]


def test_bytes_sent_are_of_messages_of_the_parameters_size(config_file):
    runs = plan_of(config_file)
    sent = {run.method: figures.total_bytes(run) for run in runs}
    size = 4 * NUM_PARAMS
    assert sent == {"ddp": 40 * size * 3 // 2, "diloco": 5 * size * 3 // 2, "noloco": 10 * size, "local": 0}


def test_correlation_is_pearsons_after_the_warmup(config_file, tmp_path):
    run = only(plan_of(config_file), "noloco")
    noise = iter(np.random.default_rng(0).uniform(0.1, 0.2, 10))
    train(run, tmp_path, 5.0, spread=lambda lr: lr * next(noise))
    curve = figures.read_curve(run, tmp_path)
    steps = np.arange(4, 41, 4)
    np.testing.assert_array_equal(curve.steps, steps)
    np.testing.assert_array_equal(curve.tokens, steps * 4 * 2 * 16)
    progress = (steps[2:] - 1 - 8) / 32  # the warmup is 8 steps
    lr = 1e-3 + 9e-3 * 0.5 * (1 + np.cos(np.pi * progress))
    np.testing.assert_allclose(curve.lr[2:], lr, rtol=1e-5)
    spread = lr * np.random.default_rng(0).uniform(0.1, 0.2, 10)[2:]
    (x, y) = lr - lr.mean(), spread - spread.mean()
    assert figures.correlation(curve, 8) == pytest.approx((x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum()))


def test_replicas_that_rounding_alone_sets_apart_have_no_spread(config_file, tmp_path):
    run = only(plan_of(config_file), "ddp")
    train(run, tmp_path, 5.0, spread=lambda lr: 1e-9)
    curve = figures.read_curve(run, tmp_path)
    assert np.isnan(curve.spread).all()
    assert np.isnan(figures.correlation(curve, 8))


def test_unfinished_runs_are_left_out_and_named(config_file, tmp_path):
    runs = plan_of(config_file)
    train(runs[0], tmp_path, 5.0)
    train(runs[1], tmp_path, 6.0, steps=36)
    rows = figures.make_rows(runs, tmp_path)
    assert [row.method for row in rows] == ["ddp"]
    page = report.markdown(rows, None, "command", None, runs[1:])
    assert "Not finished: diloco-seed7, noloco-seed7, local-seed7." in page


def finished(config_file, workdir: Path, **settings) -> list[Run]:
    runs = plan_of(config_file, **settings)
    for number, run in enumerate(runs):
        equal = run.method == "ddp"
        train(run, workdir, 5.0 + number, spread=lambda lr, equal=equal: 1e-10 if equal else 0.1 * lr)
    return runs


def test_the_table_has_mean_and_spread_over_seeds(config_file, tmp_path):
    runs = finished(config_file, tmp_path, methods=["ddp", "noloco"], seeds=2)  # ddp 5, noloco 6; ddp 7, noloco 8
    rows = figures.make_rows(runs, tmp_path)
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
        page = report.markdown(figures.make_rows(runs, tmp_path / str(every)), None, "command", None, [])
        assert ("right after outer steps alone" in page) == remarked


@pytest.mark.parametrize(
    "settings",
    [{}, {"seeds": 3}, {"methods": ["ddp"]}, {"vary": "outer.sync_every=2,4"}, {"vary": "num_replicas=2,4"}],
    ids=str,
)
def test_any_comparison_gives_a_picture(config_file, tmp_path, settings):
    runs = finished(config_file, tmp_path / "out", **settings)
    path = tmp_path / "comparison.png"
    draw(figures.make_rows(runs, tmp_path / "out"), "a field", path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    assert not list(tmp_path.glob("*.tmp"))


# Training, by a stand-in for the trainer

STAND_IN = """
import json, sys, time
from pathlib import Path

workdir = Path([a for a in sys.argv if a.startswith("--workdir=")][0].removeprefix("--workdir="))
method, plan = workdir.name.split("-")[0], json.loads(sys.argv[1])
if plan["fails"].get(method) == "start":
    sys.exit("error: no such thing")
workdir.mkdir(exist_ok=True)
(workdir / "config.json").write_text(json.dumps(plan["configs"][workdir.name]))
for step in (4, 40):
    line = {"step": step, "kind": "eval", "perplexity": 5.0, "perplexity_replicas": [5.0], "perplexity_merged": 5.0,
            "replica_spread": 1e-3}
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\\n")
    if plan["fails"].get(method) == "later":
        sys.exit("error: the loss is nan")
"""


@pytest.fixture
def stand_in(config_file, tmp_path, monkeypatch):
    """Makes the comparison call a stand-in; `stand_in[method]` is when it fails, "start" or "later"."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    configs = {run.name: to_dict(run.config) for run in plan_of(config_file)}
    fails: dict[str, str] = {}
    real = compare.Comparison._arguments

    def stand_in_arguments(self, run):
        assert real(self, run)[:2] == ["-m", "noloco_jax.train"]
        return [str(script), json.dumps({"fails": fails, "configs": configs}), *real(self, run)[2:]]

    monkeypatch.setattr(compare.Comparison, "_arguments", stand_in_arguments)
    return fails


def test_a_run_that_breaks_off_leaves_the_others_and_is_tried_again(config_file, tmp_path, stand_in, capsys):
    stand_in["diloco"] = "later"
    out = tmp_path / "out"
    assert compare.main(arguments(config_file, out, "--methods=ddp,diloco,noloco")) == 1
    output = capsys.readouterr().out
    assert "diloco-seed7: broke off with status 1: the loss is nan" in output
    assert "Not finished: diloco-seed7." in (out / "comparison.md").read_text()
    stand_in.clear()
    before = (out / "ddp-seed7/metrics.jsonl").read_text()
    assert compare.main(arguments(config_file, out, "--methods=ddp,diloco,noloco")) == 0
    assert (out / "ddp-seed7/metrics.jsonl").read_text() == before
    assert "Not finished" not in (out / "comparison.md").read_text()


def test_a_run_that_does_not_start_ends_the_comparison(config_file, tmp_path, stand_in):
    stand_in["diloco"] = "start"
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"diloco-seed7 did not start .*: no such thing"):
        compare.main(arguments(config_file, out))
    assert "| ddp |" in (out / "comparison.md").read_text()


@pytest.mark.usefixtures("stand_in")
def test_a_run_that_another_process_trains_is_not_trained_twice(config_file, tmp_path):
    out = tmp_path / "out"
    (out / "ddp-seed7").mkdir(parents=True)
    with (out / "ddp-seed7" / compare.LOG_FILE).open("a") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="ddp-seed7 is being trained by another process"):
            compare.main(arguments(config_file, out))


# Training itself


@pytest.mark.timeout(900)
def test_a_comparison_that_is_stopped_goes_on_to_its_table(tmp_path):
    config = processes.write_config(tmp_path)
    out = tmp_path / "out"
    flags = ["--methods=ddp,noloco", "--config.num_steps=12", "--config.eval_every=4"]
    command = [sys.executable, "-m", "noloco_jax.compare", *arguments(str(config), out, *flags)]

    def start() -> list[subprocess.Popen[str]]:
        return [
            subprocess.Popen(
                command,
                env=processes.environment(config),
                cwd=processes.ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        ]

    running = start()
    processes.wait_until(processes.reached(out / "ddp-seed0", 1), running)
    running[0].send_signal(signal.SIGTERM)
    [(status, output)] = processes.finish(running)
    assert status == RESTART, output
    assert output.endswith("stopped: the same command goes on\n")
    finished_in_time = processes.reached(out / "ddp-seed0", 12)()
    [(status, output)] = processes.finish(start())
    assert status == 0, output
    log = (out / "ddp-seed0" / compare.LOG_FILE).read_text()
    assert ("going on from the checkpoint" in log) != finished_in_time
    assert "[2/2] noloco-seed0: perplexity" in output
    rows = {row["method"]: row for row in csv.DictReader((out / "comparison.csv").read_text().splitlines())}
    assert float(rows["ddp"]["gap_percent_mean"]) == 0
    assert float(rows["noloco"]["replica_spread_mean"]) > 0
    last = [line for line in processes.metrics(out / "noloco-seed0") if line["kind"] == "eval"][-1]
    assert float(rows["noloco"]["perplexity_mean"]) == pytest.approx(last["perplexity"])
    sent = sum(line.get("bytes_sent", 0) for line in processes.metrics(out / "noloco-seed0"))
    assert float(rows["noloco"]["bytes_sent_mean"]) == sent
    assert (out / "comparison.png").exists()
