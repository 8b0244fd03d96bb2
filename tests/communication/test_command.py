"""The command `python -m noloco_jax.communication`: its output and its exit status."""

from fractions import Fraction

import jax
import pytest

from noloco_jax.communication import command
from noloco_jax.communication.report import Report
from noloco_jax.errors import UserError
from noloco_jax.formatting import format_bytes
from noloco_jax.spmd.compile import PROGRAMS
from noloco_jax.spmd.traffic import Collective
from support import tiny_model

CONFIG = f"""
def get_config():
    model = dict(kind={tiny_model.KIND!r}, hidden_size=16, intermediate_size=32, vocab_size=24, num_layers=1)
    return dict(num_replicas=3, model=model, data=dict(batch_size=2, sequence_length=8), mesh=dict(replica=3))
"""
PARAMETER_BYTES = 4 * (2 * 24 * 16 + 16 + 2 * 16 * 32)


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


def test_the_command_prints_a_table_for_the_devices_asked_for(config_file, devices, capsys):
    assert command.main([f"--config={config_file}", "--devices=3"]) == 0
    assert devices == {"jax_platforms": "cpu", "jax_num_cpu_devices": 3}
    output = capsys.readouterr().out
    assert "noloco, 3 replicas, mesh replica 3 x stage 1 x fsdp 1 x tensor 1" in output
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines() if line.startswith("|")]
    rows = {row[0]: row[1:] for row in lines[2:]}
    assert set(rows) == set(PROGRAMS) - {"share_batch", "correct_step"}
    sent = format_bytes(PARAMETER_BYTES * 2 / 3)
    assert rows["outer_step"] == ["ppermute", "replica", "1", format_bytes(PARAMETER_BYTES), sent]
    assert rows["inner_step"] == ["none", "", "", "", ""]


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--devices=2"], "3 devices"), (["--devices=0"], "--devices=0"), (["--device=2"], "--devices")],
)
def test_bad_input_is_refused_in_one_line(config_file, arguments, named):
    with pytest.raises(UserError, match=named) as caught:
        command.main([f"--config={config_file}", *arguments])
    assert "\n" not in str(caught.value)


def test_an_unexpected_collective_is_printed_with_status_1(config_file, capsys, monkeypatch):
    found = [Collective("psum", ("replica",), 4, Fraction(4), Fraction(1))]

    def report(config, devices):
        return Report(config, {"replica": 3, "stage": 1, "fsdp": 1, "tensor": 1}, 100, {"inner_step": found})

    monkeypatch.setattr(command, "inspect_run", report)
    monkeypatch.setattr(command, "use_cpu_cores", lambda config: None)
    assert command.main([f"--config={config_file}"]) == 1
    assert "UNEXPECTED: inner_step: psum of 4 B crosses replica" in capsys.readouterr().out
