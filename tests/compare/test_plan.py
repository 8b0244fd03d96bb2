"""The runs of a comparison: which they are, and what is refused before any starts."""

import runpy
from dataclasses import replace

import pytest

from noloco_jax.compare import command as compare
from noloco_jax.errors import UserError, main_with_errors
from support.comparisons import METHODS, arguments, only, plan_of, train
from support.paths import ROOT


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
    paper = runpy.run_path(str(ROOT / "configs/paper.py"))["OUTER"]
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
