"""Training the runs of a comparison: failures, concurrent runs, stop and resume."""

import fcntl
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from noloco_jax.cluster.stop import RESTART
from noloco_jax.config import load_config, to_dict
from noloco_jax.errors import UserError
from noloco_jax.formatting import format_bytes
from noloco_jax.tools.compare import command as compare
from noloco_jax.tools.compare.command import COMPARISON_LOCK, LOG_FILE, PLANNED_FILE, Comparison
from support import processes, warm
from support.comparisons import arguments, plan_of

# Replaces the trainer.
FAKE_TRAINER = """
import json, sys, time
from pathlib import Path

workdir = Path([a for a in sys.argv if a.startswith("--workdir=")][0].removeprefix("--workdir="))
plan = json.loads(sys.argv[1])
fate = plan["fates"].get(workdir.name, plan["fates"].get(workdir.name.split("-")[0]))
lr = json.loads(Path(sys.argv[2].removeprefix("--config=")).read_text())["inner"]["lr"]
if fate in ("start", "memory"):
    print("error: no such thing" if fate == "start" else "error: out of memory (RESOURCE_EXHAUSTED): lower the batch")
    sys.exit(2)
workdir.mkdir(exist_ok=True)
with (workdir / "starts").open("a") as file:
    file.write("x")
if fate == "hang":
    time.sleep(600)
if fate == "meet":
    (workdir / "there").touch()
    while len(list(workdir.parent.glob("*/there"))) < 2:
        time.sleep(0.01)
(workdir / "config.json").write_text(json.dumps(plan["configs"][workdir.name]))
for step in (4, 40):
    line = {"step": step, "kind": "eval", "perplexity": 5.0 + lr, "perplexity_replicas": [5.0],
            "perplexity_merged": 5.0, "replica_spread": 1e-3}
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\\n")
    if fate == "later":
        sys.exit("error: the loss is nan")
"""


@pytest.fixture
def no_pictures(monkeypatch):
    """Draw nothing: `test_report` proves the pictures of every kind of comparison, of at least one row."""

    def draw(rows, path):
        assert rows

    monkeypatch.setattr(compare, "draw_comparison", draw)


@pytest.fixture
def fake_trainer(config_file, tmp_path, monkeypatch, no_pictures):
    """Replace the trainer by a script that behaves as `fake_trainer[method or name of the run]` says.

    It fails at the "start", out of "memory" or "later", it hangs, or it waits to "meet" a concurrent run.
    """
    script = tmp_path / "fake_trainer.py"
    script.write_text(FAKE_TRAINER)
    plans = (plan_of(config_file), plan_of(config_file, seeds=2, tune="inner.lr=0.02,0.03"))
    configs = {run.name: to_dict(run.config) for plan in plans for run in plan.runs}
    fates: dict[str, str] = {}
    real = Comparison._arguments

    def fake_arguments(self, run):
        assert real(self, run)[:2] == ["-m", "noloco_jax.train"]
        return [str(script), json.dumps({"fates": fates, "configs": configs}), *real(self, run)[2:]]

    monkeypatch.setattr(Comparison, "_arguments", fake_arguments)
    return fates


@pytest.mark.usefixtures("fake_trainer")
def test_runs_have_the_configuration_of_the_plan_whatever_becomes_of_its_file(config_file, tmp_path):
    plan = plan_of(config_file)
    comparison = Comparison(workdir=tmp_path / "out", plan=plan, jobs=1, command="", console=Console(quiet=True))
    Path(config_file).write_text("an edit for something else")
    assert comparison.run() == 0
    for run in plan.runs:
        assert load_config(str(tmp_path / "out" / run.name / PLANNED_FILE)) == run.config


@pytest.mark.parametrize(
    ("fate", "reason"),
    [("later", "status 1: the loss is nan"), ("memory", "status 2: out of memory (RESOURCE_EXHAUSTED)")],
)
def test_a_failed_run_does_not_stop_the_others_and_is_retried_next_time(
    config_file, tmp_path, fake_trainer, fate, reason, capsys
):
    fake_trainer["diloco"] = fate
    out = tmp_path / "out"
    assert compare.main(arguments(config_file, out, "--methods=ddp,diloco,noloco")) == 1
    assert f"diloco-seed7: broke off with {reason}" in capsys.readouterr().out
    assert "Not finished: diloco-seed7." in (out / "comparison.md").read_text()
    fake_trainer.clear()
    before = (out / "ddp-seed7/metrics.jsonl").read_text()
    assert compare.main(arguments(config_file, out, "--methods=ddp,diloco,noloco")) == 0
    assert (out / "ddp-seed7/metrics.jsonl").read_text() == before
    assert "Not finished" not in (out / "comparison.md").read_text()


def test_a_run_that_does_not_start_ends_the_comparison(config_file, tmp_path, fake_trainer):
    fake_trainer["diloco"] = "start"
    out = tmp_path / "out"
    with pytest.raises(UserError, match="diloco-seed7 did not start, status 2: no such thing"):
        compare.main(arguments(config_file, out))
    assert "| ddp " in (out / "comparison.md").read_text()


def test_a_folder_in_use_by_another_comparison_is_refused(config_file, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with (out / COMPARISON_LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="out is in use by another comparison: wait for its end"):
            compare.main(arguments(config_file, out))


def test_jobs_sets_the_number_of_concurrent_runs(config_file, tmp_path, fake_trainer):
    fake_trainer |= {"ddp": "meet", "noloco": "meet"}
    assert compare.main(arguments(config_file, tmp_path / "out", "--methods=ddp,noloco", "--jobs=2")) == 0


def test_an_error_ends_the_concurrent_runs(config_file, tmp_path, fake_trainer):
    fake_trainer |= {"ddp": "hang", "diloco": "start"}
    out = tmp_path / "out"
    with pytest.raises(UserError, match="diloco-seed7 did not start"):
        compare.main(arguments(config_file, out, "--jobs=2"))
    assert not list((out / "ddp-seed7").glob("config.json")), "it would have gone on"


def test_tuning_uses_the_best_value_among_the_runs_that_finished(config_file, tmp_path, fake_trainer, capsys):
    fake_trainer["noloco-inner.lr=0.02-seed7"] = "later"
    out = tmp_path / "out"
    flags = arguments(config_file, out, "--methods=ddp,noloco", "--seeds=2", "--tune=inner.lr=0.02,0.03", "--jobs=2")
    assert compare.main(flags) == 1
    trained = {path.parent.name for path in out.glob("*-seed8/metrics.jsonl")}
    assert trained == {"ddp-inner.lr=0.02-seed8", "noloco-inner.lr=0.03-seed8"}
    output = capsys.readouterr().out
    assert "[6/6]" in output and "extend --tune beyond it: ddp (0.02), noloco (0.03)" in output


def start_paced(command: list[str], **options: Any) -> warm.Popen:
    """Start a trainer that takes seconds for its run, so that it is not at its end when a signal arrives."""
    python, option, *rest = command
    return warm.Popen([python, option, "support.disturbed", "paced:0.5", *rest], **options)


def stop_at(condition: Callable[[], bool]) -> None:
    """Send this process a SIGTERM once the condition holds."""
    assert processes.wait_until(condition, [])
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.timeout(900)
def test_a_stopped_comparison_resumes_and_writes_its_table(tmp_path, monkeypatch, capsys):
    config = processes.write_config(tmp_path)
    out = tmp_path / "out"
    flags = arguments(str(config), out, "--methods=ddp,noloco")
    flags += ["--config.num_steps=12", "--config.eval_every=4"]
    processes.set_environment(config, monkeypatch)
    constants = {"DEVNULL": subprocess.DEVNULL, "STDOUT": subprocess.STDOUT}
    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(Popen=start_paced, **constants))
    stopping = threading.Thread(target=stop_at, args=(processes.reached(out / "ddp-seed0", 1),))
    stopping.start()
    assert compare.main(flags) == RESTART
    stopping.join()
    output = capsys.readouterr().out
    assert output.endswith("stopped: the same command resumes\n")
    assert max(line["step"] for line in processes.metrics(out / "ddp-seed0")) < 12
    monkeypatch.setattr(compare, "subprocess", SimpleNamespace(Popen=warm.Popen, **constants))
    assert compare.main(flags) == 0
    output = capsys.readouterr().out
    assert "resuming from the checkpoint" in (out / "ddp-seed0" / LOG_FILE).read_text()
    assert "[2/2] noloco-seed0: perplexity" in output
    page = (out / "comparison.md").read_text()
    rows = {cells[1]: cells for line in page.splitlines() if len(cells := re.split(r" *\| *", line)) > 5}
    last = [line for line in processes.metrics(out / "noloco-seed0") if line["kind"] == "eval"][-1]
    assert rows["noloco"][4] == f"{last['perplexity']:.2f}" and rows["ddp"][5] == "+0.00"
    sent = sum(line.get("bytes_sent", 0) for line in processes.metrics(out / "noloco-seed0"))
    assert rows["noloco"][8] == format_bytes(sent)
    assert (out / "comparison.png").exists()
