"""The command `python -m noloco_jax.bench`: its variants, and the processes that measure them."""

import json
import re
import signal

import pytest

from noloco_jax.errors import UserError
from noloco_jax.tools.bench import command
from noloco_jax.tools.bench.command import REFUSED, bench_variants, in_own_process
from support import platforms, processes
from support.benchmarks import end_by_sigkill, threaded_modules_before_keeping_memory


@pytest.fixture(autouse=True)
def sigterm():
    """Restore the SIGTERM handler, which the command replaces."""
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vary=num_replicas"], "--vary=num_replicas is not of the form FIELD=VALUE,VALUE"),
        (["--vary=num_replica=2"], "unknown config field 'num_replica': did you mean 'num_replicas'?"),
        (["--vary=num_replicas=2,x"], "--config.num_replicas=x is not allowed: give a whole number"),
        (["--vary=num_replicas=2", "--vary=num_replicas=4"], "--vary have num_replicas twice"),
        (["--steps=0"], "--steps=0 is no number of steps"),
        (["--data_seconds=-1"], "--data_seconds=-1 is no time"),
        (["--compile_only", "--profile=there"], "--profile traces steps and --compile_only takes none"),
        (["--json=missing/b.json"], "there is no folder missing"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_is_measured(arguments, message, config_file, monkeypatch):
    monkeypatch.setattr(command, "in_own_process", lambda *_: pytest.fail("nothing is to be measured"))
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        command.main([f"--config={config_file}", *arguments])
    assert "\n" not in str(caught.value)


def test_saved_figures_are_not_overwritten(config_file, tmp_path):
    path = tmp_path / "bench.json"
    path.write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        command.main([f"--config={config_file}", f"--json={path}"])
    assert path.read_text() == "mine"


def test_variants_are_all_combinations_over_the_overrides(config_file):
    vary = ["num_replicas/mesh.replica=2/1,4/2", "model.num_layers=1,2"]
    variants = bench_variants(str(config_file), ["--config.model.num_layers=3"], vary)
    assert [(c.num_replicas, c.mesh.replica, c.model.num_layers) for _, c in variants] == [
        *((2, 1, 1), (2, 1, 2), (4, 2, 1), (4, 2, 2)),
    ]
    assert variants[1][0] == "num_replicas=2 model.num_layers=2"
    [(label, _)] = bench_variants(str(config_file), ["--config.num_replicas=2"], [])
    assert label == "method=noloco num_replicas=2"


def test_a_killed_variant_is_reported():
    assert in_own_process(end_by_sigkill) == {"error": "its process was ended by SIGKILL, see above", "status": 1}


def test_a_measurement_keeps_freed_memory_before_importing_threaded_modules():
    assert in_own_process(threaded_modules_before_keeping_memory) == {"imported": []}


def test_a_variant_unfit_for_the_devices_is_refused_and_the_next_one_still_runs(
    config_file, tmp_path, monkeypatch, capfd
):
    path = tmp_path / "bench.json"
    arguments = [f"--config={config_file}", "--compile_only", f"--json={path}"]
    with pytest.raises(UserError, match=r"model\.hidden_size=32"):  # 3 heads do not divide the width: refused at once
        command.main([*arguments, "--config.model.kind=llama", "--vary=model.num_heads=4,3"])
    assert not path.exists()

    # Only a variant's process knows the number of devices.
    processes.set_environment(config_file, monkeypatch)
    monkeypatch.setenv("XLA_FLAGS", " ".join(platforms.QUICK_TO_COMPILE))  # without a number of devices
    small = ["--config.mesh.fsdp=2", "--config.model.num_layers=1"]
    assert command.main([*arguments, *small, "--vary=data.batch_size=3,4"]) == REFUSED
    refused, measured = json.loads(path.read_text())["runs"]
    assert "are not a multiple of mesh.fsdp=2" in refused["error"]
    assert measured["config"]["data"]["batch_size"] == 4 and measured["compile_seconds"]["outer_step"] > 0
    assert "failed: data.batch_size=3" in capfd.readouterr().out
