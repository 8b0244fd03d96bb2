"""The command `python -m noloco_jax.communication`: its output and its exit status."""

import json

import jax
import pytest

from noloco_jax.communication import command
from noloco_jax.communication.report import PROGRAMS, Report
from noloco_jax.errors import UserError
from noloco_jax.spmd.hlo import Collective, Traffic
from support.traffic import TINY
from support.traffic import tiny_numel as numel

CONFIG = f"""
def get_config():
    model = {TINY!r}
    return dict(num_replicas=3, model=model | dict(num_layers=1), data=dict(batch_size=2, sequence_length=8),
                mesh=dict(replica=3))
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def devices(monkeypatch):
    """Make JAX look uninitialized: it then has as many of the tests' devices as the command asks for."""
    there, updates = jax.devices(), {}
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    monkeypatch.setattr(jax, "devices", lambda: there[: updates["jax_num_cpu_devices"]])
    return updates


def test_the_command_prints_json_for_the_devices_asked_for(config_file, devices, capsys):
    assert command.main([f"--config={config_file}", "--devices=3", "--json", "--check"]) == 0
    assert devices == {"jax_platforms": "cpu", "jax_num_cpu_devices": 3}
    values = json.loads(capsys.readouterr().out)
    assert values["mesh"] == {"replica": 3, "stage": 1, "fsdp": 1, "tensor": 1}
    optional = {"share_batch", "correct_step"}
    assert set(values["programs"]) == set(PROGRAMS) - optional
    sent = values["programs"]["outer_step"]["bytes_across_replicas"]
    assert sent == {"least": 4 * numel(1), "most": 4 * numel(1)} and values["broken_promises"] == []
    kinds = {collective["kind"] for collective in values["programs"]["outer_step"]["collectives"]}
    assert kinds == {"collective-permute"}


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--devices=2"], "3 devices"),
        (["--devices=0"], "--devices=0"),
        (["--device=2"], "--devices"),
        (["--devices=3", "--processes=2"], "--processes=2"),
    ],
)
def test_bad_input_is_refused_in_one_line(config_file, arguments, named):
    with pytest.raises(UserError, match=named) as caught:
        command.main([f"--config={config_file}", *arguments])
    assert "\n" not in str(caught.value)


def test_the_check_fails_where_a_promise_is_broken(config_file, capsys, monkeypatch):
    traffic = {name: Traffic() for name in PROGRAMS}
    traffic["inner_step"].always[Collective("all-reduce", ("replica",), 4, ("f32[]",))] += 1

    def report(config, devices, *, num_processes):
        return Report(config, {"replica": 3, "stage": 1, "fsdp": 1, "tensor": 1}, 100, 3, traffic)

    monkeypatch.setattr(command, "inspect_run", report)
    monkeypatch.setattr(command, "use_cpu_cores", lambda config: None)
    assert command.main([f"--config={config_file}", "--check"]) == 1
    assert "BROKEN PROMISE: inner step: all-reduce of f32[] crosses replica" in capsys.readouterr().out
    assert command.main([f"--config={config_file}"]) == 0
