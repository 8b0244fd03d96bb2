"""Plan of a comparison: its runs, and the input refused before any of them starts."""

import gzip
import json
import math
import re
import runpy
from dataclasses import replace

import pytest

from noloco_jax.errors import UserError
from noloco_jax.tools.compare import command as compare
from noloco_jax.tools.compare.command import share_of_cores, share_of_gpus
from support.comparisons import METHODS, arguments, only, plan_of, train
from support.paths import ROOT


def test_the_runs_of_a_seed_differ_only_in_method_and_outer_step(config_file):
    for seed in (7, 8):
        runs = [run for run in plan_of(config_file, seeds=2).runs if run.seed == seed]
        assert [run.variant.method for run in runs] == METHODS
        first = runs[0].config
        for run in runs:
            assert replace(run.config, method=first.method, outer=first.outer) == first
            assert run.config.seed == seed and run.config.method == run.variant.method
            assert run.name == f"{run.variant.method}-seed{seed}"


def test_diloco_has_the_papers_settings_relative_to_noloco(config_file):
    runs = plan_of(config_file)
    noloco, diloco = only(runs, "noloco").config.outer, only(runs, "diloco").config.outer
    assert (noloco.lr, noloco.momentum, noloco.sync_every) == (0.6, 0.4, 4)
    assert (diloco.lr, diloco.momentum, diloco.sync_every, diloco.nesterov) == (0.7, 0.3, 8, False)
    paper = runpy.run_path(str(ROOT / "configs/paper.py"))["OUTER"]
    assert paper["diloco"] == (diloco.lr, diloco.momentum, paper["noloco"][2] * diloco.sync_every // noloco.sync_every)


def test_methods_without_a_baseline_keep_their_defaults_but_nolocos_sync_every(config_file):
    runs = plan_of(config_file, "--config.outer.lr=0.8", methods=["noloco", "epidemic", "sparseloco"])
    noloco, epidemic, sparseloco = (run.config.outer for run in runs.runs)
    assert (noloco.lr, noloco.sync_every, epidemic.sync_every, sparseloco.sync_every) == (0.8, 4, 4, 4)
    assert (sparseloco.lr, sparseloco.top_k, epidemic.order) == (1.0, 64, "passes")


def test_a_varied_field_adds_runs_only_of_the_variants_that_heed_it(config_file):
    variants = ["own:outer.sync_every=3"]
    runs = {run.name: run for run in plan_of(config_file, variants=variants, vary="outer.sync_every=5,10").runs}
    assert list(runs) == [
        "ddp-seed7",
        "diloco-outer.sync_every=5-seed7",
        "diloco-outer.sync_every=10-seed7",
        "noloco-outer.sync_every=5-seed7",
        "noloco-outer.sync_every=10-seed7",
        "local-seed7",
        "own-seed7",
    ]
    assert runs["diloco-outer.sync_every=5-seed7"].config.outer.sync_every == 10
    assert runs["noloco-outer.sync_every=5-seed7"].config.outer.sync_every == 5
    assert runs["own-seed7"].config.outer.sync_every == 3


def test_a_variant_is_a_name_a_method_and_settings(config_file):
    variants = [
        "often:outer.sync_every=2,outer.wire=int8",
        "ddp:inner.lr=0.03",
        "rare:method=diloco,outer.sync_every=9,inner.optimizer=muon",
    ]
    plan = plan_of(config_file, methods=(), variants=variants)
    often, ddp, rare = (only(plan, title) for title in ("often", "ddp", "rare"))
    assert [run.name for run in plan.runs] == ["often-seed7", "ddp-seed7", "rare-seed7"]
    assert (often.config.method, ddp.config.method, rare.config.method) == ("noloco", "ddp", "diloco")
    assert (often.config.outer.sync_every, often.config.outer.wire) == (2, "int8")
    assert (ddp.config.inner.lr, ddp.config.inner.min_lr) == (0.03, 0.003)  # a reference of the file follows
    assert (rare.config.outer.sync_every, rare.config.outer.momentum, rare.config.inner.optimizer) == (9, 0.3, "muon")


def test_varied_fields_are_combined_and_grouped_ones_change_together(config_file):
    vary = ["num_steps/eval_every=8/4,16/8", "outer.sync_every=2,4"]
    plan = plan_of(config_file, methods=["ddp", "noloco"], vary=vary)
    found = [
        (run.variant.method, run.config.num_steps, run.config.eval_every, run.config.outer.sync_every)
        for run in plan.runs
        if run.variant.method == "noloco"
    ]
    assert found == [("noloco", *length, sync) for length in ((8, 4), (16, 8)) for sync in (2, 4)]
    assert plan.runs[2].name == "noloco-num_steps=8-outer.sync_every=2-seed7"
    for variant, reference in plan.references.items():
        assert reference.method == "ddp" and reference.varied == variant.varied[:1]


def test_a_plan_is_a_file_of_flags(config_file, tmp_path, capsys):
    plan = tmp_path / "plan.txt"
    plan.write_text(f"--config={config_file}  # of the tests\n--variant='a: outer.lr=1'\n\n--seeds 2 --methods=ddp\n")
    assert compare.main([f"@{plan}", f"--workdir={tmp_path / 'out'}", "--dry_run"]) == 0
    output = capsys.readouterr().out
    assert [line for line in output.splitlines() if line.endswith("(to do)")] == [
        f"{name}-seed{seed} (to do)" for seed in (7, 8) for name in ("ddp", "a")
    ]
    assert not (tmp_path / "out").exists()


def test_the_reference_is_the_most_similar_ddp_with_the_same_inner_optimizer(config_file):
    variants = [
        "adam_slow:inner.lr=0.001",
        "ddp_slow:method=ddp,inner.lr=0.001",
        "ddp_muon:method=ddp,inner.optimizer=muon",
        "muon:inner.optimizer=muon,outer.sync_every=2",
        "adamw:inner.optimizer=adamw",
    ]
    plan = plan_of(config_file, methods=["noloco", "ddp"], variants=variants)
    assert {variant.title: other.title for variant, other in plan.references.items()} == {
        "noloco": "ddp",
        "ddp": "ddp",
        "adam_slow": "ddp_slow",
        "ddp_slow": "ddp_slow",
        "ddp_muon": "ddp_muon",
        "muon": "ddp_muon",
    }


def test_other_seeds_are_trained_only_at_the_best_value_of_the_first(config_file):
    plan = plan_of(config_file, methods=["ddp", "noloco"], seeds=3, tune="inner.lr=0.01,0.02,0.03")
    first = [run for run in plan.runs if run.seed == 7]
    assert [run.config.inner.lr for run in first] == [0.01, 0.02, 0.03] * 2
    assert plan.total == 6 + 4
    assert plan.needed({}) == first
    perplexities = dict(zip(first[:5], (5.0, 4.0, math.inf, 8.0, 7.0), strict=True))  # the sixth broke off
    more = [(run.seed, run.variant.title, run.tuned) for run in plan.needed(perplexities) if run not in first]
    assert more == [(8, "ddp", "0.02"), (8, "noloco", "0.02"), (9, "ddp", "0.02"), (9, "noloco", "0.02")]


def test_variants_that_set_or_ignore_the_tuned_field_are_not_tuned(config_file):
    plan = plan_of(config_file, methods=["ddp", "noloco"], variants=["own:outer.lr=1"], tune="outer.lr=0.5,0.7")
    names = ["ddp-seed7", "noloco-outer.lr=0.5-seed7", "noloco-outer.lr=0.7-seed7", "own-seed7"]
    assert [run.name for run in plan.runs] == names


def test_the_ends_of_a_list_are_its_least_and_greatest_number(config_file):
    plan = plan_of(config_file, methods=["ddp"], tune="inner.lr/inner.min_lr=2e-3/2e-4,0.001/1e-4,4e-3/4e-4")
    assert [plan.is_at_end(value) for value in ("2e-3", "0.001", "4e-3", None)] == [False, True, True, False]
    assert not plan_of(config_file, methods=["ddp"], tune="inner.optimizer=adam,muon").is_at_end("muon")


def test_jobs_share_cores_and_one_alone_has_all():
    assert [share_of_cores([0, 1, 2, 3, 4], 2, slot) for slot in (0, 1)] == [{0, 1}, {2, 3, 4}]
    assert share_of_cores([0, 1], 1, 0) == share_of_cores([0, 1], 3, 2) == frozenset()


NAMED = {"CUDA_VISIBLE_DEVICES": "3,GPU-7e-1,6"}


@pytest.mark.parametrize(
    ("environment", "jobs", "gpus", "memory"),
    [
        (NAMED, 1, None, None),
        (NAMED, 2, ["3", "GPU-7e-1,6"], None),
        (NAMED, 5, ["3", "GPU-7e-1", "6", "3", "GPU-7e-1"], "0.45"),
        (NAMED | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}, 4, ["3", "GPU-7e-1", "6", "3"], None),
        ({}, 2, ["0", "0"], "0.45"),
    ],
    ids=["one job", "shares", "shared", "limited by the user", "the first"],
)
def test_jobs_share_the_visible_gpus_and_their_memory(environment, jobs, gpus, memory):
    """JAX refuses a limit of memory beside the user's own."""
    shares = [share_of_gpus(environment, jobs, slot) for slot in range(jobs)]
    expected = [{}] * jobs if gpus is None else [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus]
    limit = {"XLA_CLIENT_MEM_FRACTION": memory} if memory else {}
    assert shares == [share | limit for share in expected]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--methods=ddp,nolocco"], ["--methods=ddp,nolocco", "'nolocco'", "did you mean 'noloco'"]),
        (["--methods=ddp,ddp"], ["two variants are called 'ddp'"]),
        (["--variant=ddp:inner.lr=0.1", "--methods=ddp"], ["two variants are called 'ddp'"]),
        (["--seeds=0"], ["--seeds=0"]),
        (["--vary=outer.sync_evry=5"], ["unknown config field 'outer.sync_evry'", "did you mean 'outer.sync_every'"]),
        (["--vary=outer.sync_every"], ["FIELD=VALUE"]),
        (["--vary=outer.sync_every=5,5"], ["twice"]),
        (["--vary=outer.sync_every=5,x"], ["outer.sync_every", "whole number"]),
        (["--vary=seed=5,6"], ["--seeds"]),
        (["--vary=outer=5"], ["'outer' is a group"]),
        (["--config.method=ddp"], ["method='ddp'", "noloco"]),
        (["--config.outer.group_size=9"], ["outer.group_size=9", "num_replicas=4"]),
        (["--variant=often"], ["--variant=often", "NAME:FIELD=VALUE"]),
        (["--variant=often:outer.lr"], ["'outer.lr' is not of the form FIELD=VALUE"]),
        (["--variant=often:outer.lr=1,outer.lr=2"], ["outer.lr twice"]),
        (["--variant=often:method=nolocco"], ["did you mean 'noloco'"]),
        (["--variant=often:seed=1"], ["--seeds"]),
        (["--tune=inner.lr=0.1"], ["two or more"]),
        (["--tune=inner.lr=0.1,0.2", "--vary=inner.lr=0.1,0.2"], ["--vary and --tune have inner.lr twice"]),
        (["--vary=num_steps/eval_every=8/4,16"], ["a value for each of num_steps and eval_every"]),
        (
            ["--vary=inner.lr/eval_every=0.1/4,0.2/8", "--variant=fast:inner.lr=0.3"],
            ["inner.lr and eval_every change together", "fast sets inner.lr itself"],
        ),
        (["@nowhere.txt"], ["@nowhere.txt", "a file of flags"]),
        (["--jobs=0"], ["--jobs=0"]),
    ],
)
def test_bad_input_is_an_error_of_one_line_before_anything_is_written(config_file, tmp_path, flags, named):
    with pytest.raises(UserError) as raised:
        compare.main(arguments(config_file, tmp_path / "out", *flags))
    message = str(raised.value)
    assert all(part in message for part in named) and "\n" not in message
    assert not (tmp_path / "out").exists()


def test_the_folder_of_another_comparison_is_refused(config_file, tmp_path):
    out = tmp_path / "out"
    for run in plan_of(config_file, methods=["ddp", "noloco"]).runs:
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


def test_runs_that_nothing_tells_apart_are_refused(config_file):
    with pytest.raises(UserError, match=r"inner\.momentum=0\.5-seed7 and .* would be the same run"):
        plan_of(config_file, methods=["noloco"], vary="inner.momentum=0.5,0.95")
    with pytest.raises(UserError, match="noloco-seed7 and same-seed7 would be the same run"):
        plan_of(config_file, methods=["noloco"], variants=["same:outer.fragments=1"])
    assert len(plan_of(config_file, methods=["noloco"], vary="inner.b1=0.5,0.95").runs) == 2


@pytest.mark.parametrize("plan", sorted((ROOT / "configs/plans").glob("*.txt")), ids=lambda path: path.stem)
def test_the_shipped_plans_are_valid_comparisons_of_the_stated_number_of_runs(plan, tmp_path, capsys):
    for split in ("train", "validation"):
        with gzip.open(tmp_path / f"c4-{split}.00000-of-00001.json.gz", "wt") as file:
            file.writelines(json.dumps({"text": "a few words " * 9}) + "\n" for _ in range(1000))
    flags = [f"@{plan}", f"--workdir={tmp_path / 'out'}", f"--config.data.path={tmp_path}", "--dry_run"]
    assert compare.main(flags) == 0
    stated = re.search(r"(\d+) runs", plan.read_text())
    assert stated and capsys.readouterr().out.count("(to do)") == int(stated[1])
