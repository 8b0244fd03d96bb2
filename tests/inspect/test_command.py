"""The command `python -m noloco_jax.inspect`: what it prints, and how it ends."""

import json
import subprocess
import sys

import jax
import pytest

from noloco_jax.inspect import __main__ as inspect
from noloco_jax.spmd.hlo import Collective, Traffic
from support.paths import ROOT
from support.traffic import MODEL, numel

CONFIG = f"""
def get_config():
    model = {MODEL!r}
    return dict(num_replicas=3, model=model | dict(num_layers=1), data=dict(batch_size=2, sequence_length=8),
                mesh=dict(replica=3))
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(CONFIG)
    return path


def command(*arguments: str) -> subprocess.CompletedProcess:
    program = [sys.executable, "-m", "noloco_jax.inspect", *arguments]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True)


def test_the_command_prints_json_for_the_devices_asked_for(config_file):
    result = command(f"--config={config_file}", "--devices=3", "--json", "--check")
    assert result.returncode == 0, result.stderr
    values = json.loads(result.stdout)
    assert values["mesh"] == {"replica": 3, "stage": 1, "fsdp": 1, "tensor": 1}
    assert set(values["programs"]) == set(inspect.PROGRAMS)
    sent = values["programs"]["outer_step"]["bytes_across_replicas"]
    assert sent == {"least": 4 * numel(1), "most": 4 * numel(1)} and values["broken_promises"] == []
    kinds = {collective["kind"] for collective in values["programs"]["outer_step"]["collectives"]}
    assert kinds == {"collective-permute"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--devices=2"], "3 devices"), (["--devices=0"], "--devices=0"), (["--device=2"], "--devices")],
)
def test_bad_input_ends_with_status_2_and_one_line(config_file, arguments, named, capsys, monkeypatch):
    updates = []
    monkeypatch.setattr(jax.config, "update", lambda *update: updates.append(update))
    monkeypatch.setattr(jax, "devices", lambda: [object()] * dict(updates)["jax_num_cpu_devices"])
    with pytest.raises(SystemExit) as exit_:
        inspect.main_with_errors(lambda: inspect.main([f"--config={config_file}", *arguments]))
    message = capsys.readouterr().err
    assert exit_.value.code == 2 and named in message and message.count("\n") == 1


def test_the_check_fails_where_a_promise_is_broken(config_file, capsys, monkeypatch):
    traffic = {name: Traffic() for name in inspect.PROGRAMS}
    traffic["inner_step"].always[Collective("all-reduce", ("replica",), 4, ("f32[]",))] += 1

    def report(config, devices):
        return inspect.Report(config, {"replica": 3, "stage": 1, "fsdp": 1, "tensor": 1}, 100, 3, traffic)

    monkeypatch.setattr(inspect, "inspect_run", report)
    monkeypatch.setattr(inspect, "use_cpu_cores", lambda config: None)
    assert inspect.main([f"--config={config_file}", "--check"]) == 1
    assert "BROKEN PROMISE: inner step: all-reduce of f32[] crosses replica" in capsys.readouterr().out
    assert inspect.main([f"--config={config_file}"]) == 0
