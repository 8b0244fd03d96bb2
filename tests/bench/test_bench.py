"""The benchmark: its variants, its figures against independent ones, its command line."""

import io
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from noloco_jax.bench import command as bench
from noloco_jax.bench import rates, report, timing
from noloco_jax.bench.measure import Options, measure
from noloco_jax.bench.variants import Variant, make_variants
from noloco_jax.config.fields import TrainConfig, from_dict
from noloco_jax.errors import UserError
from support import processes
from support.paths import ROOT

SMALL = {
    "num_replicas": 4,
    "model": {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1},
    "outer": {"sync_every": 4},
    "data": {"sequence_length": 8, "batch_size": 2},
    "mesh": {"replica": 2},
}
# By hand: embedding and head, attention's q, k, v, o, the MLP's three, three norms.
PARAMETERS = 2 * 259 * 16 + 16 * (16 + 8 + 8 + 16) + 3 * 16 * 32 + 3 * 16
FLOPS_PER_TOKEN = 3 * (2 * (259 * 16 + 16 * (16 + 8 + 8 + 16) + 3 * 16 * 32) + 2 * 8 * 16)
QUICK = Options(steps=3, data_seconds=0.05, compile_only=False, profile=None)


def small(**changes) -> TrainConfig:
    return from_dict(SMALL | changes)


@pytest.fixture
def config_file(tmp_path) -> Path:
    return processes.write_config(tmp_path / "made")


@pytest.fixture(scope="module")
def fast_matrices():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rates, "matrix_side", lambda backend: 64)
        patch.setattr(rates, "_MATRIX_SECONDS", 0.01)
        yield


@pytest.fixture(scope="module")
def result(fast_matrices, tmp_path_factory) -> dict:
    data = processes.write_config(tmp_path_factory.mktemp("run") / "made").parent / "data"
    return measure(small(data=SMALL["data"] | {"path": str(data)}), QUICK)


@pytest.fixture(scope="module")
def ddp_result(fast_matrices, tmp_path_factory) -> dict:
    """Of a run without data, with a trace."""
    return measure(small(method="ddp"), replace(QUICK, profile=tmp_path_factory.mktemp("trace")))


def test_a_measured_run_has_every_figure_and_they_agree(result):
    step, outer = result["step_seconds"], result["outer_step_seconds"]
    assert 0 < step["lower_quartile"] <= step["median"] <= step["upper_quartile"]
    assert 0 < outer["lower_quartile"] <= outer["median"] <= outer["upper_quartile"]
    assert result["tokens_per_second"] == pytest.approx(4 * 2 * 8 / step["median"])
    assert result["model_flops_per_token"] == FLOPS_PER_TOKEN
    assert result["model_flops_per_second"] == pytest.approx(result["tokens_per_second"] * FLOPS_PER_TOKEN)
    assert result["mfu"] == pytest.approx(result["model_flops_per_second"] / result["matrix_flops_per_second"])
    assert result["outer_share"] == pytest.approx(outer["median"] / (outer["median"] + 4 * step["median"]))
    assert result["bytes_sent"] == 4 * PARAMETERS
    assert result["data_tokens_per_second"] > 0
    assert result["data_missing"] == ""
    assert set(result["compile_seconds"]) == {"inner_step", "outer_step"}
    assert json.loads(json.dumps(result)) == result


def test_memory_is_the_programs_and_the_state_beside_them(result):
    programs = result["program_memory_bytes"]
    replicas = 2  # of a device
    inner, outer = programs["inner_step"], programs["outer_step"]
    # Adam: two moments and two counters a replica; outer: slow weights and momentum a replica, one counter.
    assert outer["beside"] == replicas * (8 * PARAMETERS + 8)
    assert inner["beside"] == replicas * 8 * PARAMETERS + 4
    for program in (inner, outer):
        held = program["arguments"] + program["temporaries"] + program["outputs"] - program["aliased"]
        assert program["total"] == held
    assert result["peak_memory_bytes"] == max(program["total"] + program["beside"] for program in programs.values())
    batch = 2 * replicas * 2 * 8 * 4
    assert inner["arguments"] >= replicas * 12 * PARAMETERS + batch


def test_an_offloaded_outer_state_is_not_beside_the_inner_step(result):
    held = measure(small(outer=SMALL["outer"] | {"offload": True}), replace(QUICK, compile_only=True))
    programs, on_device = held["program_memory_bytes"], result["program_memory_bytes"]
    assert programs == on_device | {"inner_step": on_device["inner_step"] | {"beside": 0}}


def test_an_offloaded_outer_state_is_timed_from_the_host(monkeypatch):
    config = small(outer=SMALL["outer"] | {"offload": True})
    kinds = []
    transfer = jax.device_put

    def recorded(x, *arguments, **options):
        kinds.extend(leaf.sharding.memory_kind for leaf in jax.tree.leaves(x) if isinstance(leaf, jax.Array))
        return transfer(x, *arguments, **options)

    monkeypatch.setattr(jax, "device_put", recorded)
    measure(config, QUICK)
    assert "pinned_host" in kinds


def test_methods_without_outer_steps_have_no_figures_of_them(ddp_result):
    assert ddp_result["outer_step_seconds"] is None and ddp_result["outer_share"] is None
    assert ddp_result["pairings"] is None
    assert ddp_result["bytes_sent"] == 2 * 4 * PARAMETERS * 3 // 4
    assert set(ddp_result["compile_seconds"]) == {"inner_step"}


def test_data_that_are_not_there_leave_the_rest_measured(ddp_result):
    assert ddp_result["data_tokens_per_second"] is None
    assert "data.path" in ddp_result["data_missing"]
    assert ddp_result["tokens_per_second"] > 0


def test_a_trace_is_written_for_both_viewers(ddp_result):
    perfetto = Path(ddp_result["profile"])
    assert perfetto.parent.parent.name == "profile"
    assert perfetto.stat().st_size > 1000
    assert len(list(perfetto.parent.glob("*.xplane.pb"))) == 1


def test_compiling_only_allocates_nothing_and_counts_the_pairings(monkeypatch):
    def forbidden(*_):
        raise AssertionError("nothing is to run")

    monkeypatch.setattr(timing.TimedRun, "__init__", forbidden)
    result = measure(small(num_replicas=8), Options(1, 1.0, compile_only=True, profile=None))
    assert result["pairings"] == 7
    assert result["peak_memory_bytes"] > 0
    assert "step_seconds" not in result


def test_no_outer_step_is_timed_in_which_partners_meet_for_the_first_time():
    taken: list[int] = []

    class Runner:
        def inner(self):
            return None

        def outer(self, round):
            taken.append(round)
            return len(taken)

    timed = [taken[int(number) - 1] for number in timing.outer_times(Runner())]  # pyright: ignore[reportArgumentType]
    assert len(set(timed)) == len(timed) == 5
    assert set(timed) <= set(taken[: -len(timed)])


def test_a_step_is_timed_from_end_to_end_with_one_dispatched_ahead(monkeypatch):
    dispatched, events = iter(range(100)), []

    class Runner:
        def inner(self):
            events.append(("dispatch", number := next(dispatched)))
            return number

    monkeypatch.setattr(jax, "block_until_ready", lambda number: events.append(("wait", number)) or time.sleep(0.02))
    seconds = timing.inner_times(Runner(), steps=4)  # pyright: ignore[reportArgumentType]
    assert len(seconds) == 4
    assert min(seconds) >= 0.02
    assert events[:5] == [("dispatch", 0), ("dispatch", 1), ("wait", 0), ("dispatch", 2), ("wait", 1)]


def test_spread_is_the_median_and_the_quartiles():
    assert timing.quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == {"median": 3.0, "lower_quartile": 2.0, "upper_quartile": 4.0}


def test_random_batches_stay_within_the_vocabulary_and_differ_between_replicas():
    first, other = (next(timing.RandomStream(small(), replica)) for replica in (0, 1))
    assert all(x.shape == (2, 8) and x.dtype == np.int32 and 0 <= x.min() <= x.max() < 259 for x in first.values())
    assert (first["input_ids"] != other["input_ids"]).any()


def test_variants_are_all_combinations_over_the_overrides(config_file):
    variants = make_variants(
        str(config_file), ["--config.model.num_layers=3"], ["num_replicas=2,4", "model.num_layers=1,2"]
    )
    assert [(v.config.num_replicas, v.config.model.num_layers) for v in variants] == [(2, 1), (2, 2), (4, 1), (4, 2)]
    assert variants[1].label == "num_replicas=2 model.num_layers=2"


def test_without_fields_to_vary_the_configuration_is_the_variant(config_file):
    [variant] = make_variants(str(config_file), ["--config.num_replicas=2"], [])
    assert variant.config.num_replicas == 2
    assert variant.label == "method=noloco num_replicas=2"


def test_one_replica_is_measured_as_local_and_said_so(config_file):
    one, two = make_variants(str(config_file), [], ["num_replicas=1,2"])
    assert (one.config.method, two.config.method) == ("local", "noloco")
    assert "method=local" in one.note and not two.note
    assert one.overrides[-1] == "--config.method=local"


def shown(rows, width: int | None = None) -> str:
    """What is printed on a terminal of that width, or to a file."""
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=width is not None, color_system=None, highlight=False, soft_wrap=True
    )
    report.show(rows, "a run", compile_only=False, console=console)
    return re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())


def rows_of(result: dict, **changes) -> list[report.VariantResult]:
    variant = Variant({"num_replicas": "4"}, (), small(), "")
    return [(variant, result | changes)]


def test_the_table_is_one_line_a_variant_where_there_is_no_terminal(result):
    text = shown(rows_of(result, mfu=0.25, bytes_sent=3 * 2**20))
    [line] = [line for line in text.splitlines() if re.match(r"\s*4\s", line)]
    assert "25 %" in line and "3 MiB" in line
    assert "embedding out" in text and "causal attention counted once" in text and "2048 x 2048" in text


def test_a_narrow_terminal_gets_two_tables_with_nothing_cut(result):
    text = shown(rows_of(result), width=90)
    assert text.count("num_replicas") == 2
    assert "…" not in text


def test_a_slow_data_pipeline_is_warned_of(result):
    speed = result["tokens_per_second"]
    assert "warning" in shown(rows_of(result, data_tokens_per_second=2.9 * speed))
    assert "warning" not in shown(rows_of(result, data_tokens_per_second=3.1 * speed))


def test_a_failed_variant_is_shown_beside_the_measured_ones(result):
    failed = (Variant({"num_replicas": "64"}, (), small(), ""), {"error": "out of memory", "status": 1})
    text = shown([*rows_of(result), failed])
    assert "failed: num_replicas=64: out of memory" in text
    assert re.search(r"^\s*4\s", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vary", "num_replicas"], "--vary num_replicas is not FIELD=VALUE,VALUE"),
        (["--vary", "num_replicas=2,"], "is not FIELD=VALUE,VALUE"),
        (["--vary", "num_replica=2"], "unknown config field 'num_replica': did you mean 'num_replicas'?"),
        (["--vary", "num_replicas=2,x"], "--config.num_replicas=x: expected int"),
        (["--vary", "method=noloco,nococo"], "method='nococo' is unknown: did you mean 'noloco'?"),
        (["--vary", "num_replicas=2", "num_replicas=4"], "--vary names num_replicas twice"),
        (["--steps=0"], "--steps=0 is no number of steps"),
        (["--data_seconds=-1"], "--data_seconds=-1 is no time"),
        (["--compile_only", "--profile=there"], "--profile traces steps and --compile_only takes none"),
        (["--json=missing/b.json"], "there is no folder missing"),
        (["--step=3"], "unknown argument '--step=3': did you mean '--steps'?"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_is_measured(arguments, message, config_file, monkeypatch):
    monkeypatch.setattr(bench, "_measure_apart", lambda *_: pytest.fail("nothing is to be measured"))
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        bench.main([f"--config={config_file}", *arguments])
    assert "\n" not in str(caught.value)


def test_figures_that_are_saved_are_not_overwritten(config_file, tmp_path):
    path = tmp_path / "bench.json"
    path.write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        bench.main([f"--config={config_file}", f"--json={path}"])
    assert path.read_text() == "mine"


def test_a_variant_whose_process_is_killed_is_a_failure_and_the_others_go_on(config_file, monkeypatch, capsys):
    killed = subprocess.CompletedProcess([], -signal.SIGKILL)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: killed)
    assert bench.main([f"--config={config_file}", "--vary", "num_replicas=2,4"]) == 1
    out = capsys.readouterr().out
    assert "failed: num_replicas=2: its process was ended by SIGKILL" in out and "failed: num_replicas=4" in out


def run_command(config_file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "noloco_jax.bench", f"--config={config_file}", *arguments],
        env={k: v for k, v in processes.environment(config_file).items() if k != "XLA_FLAGS"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=processes.PATIENCE,
    )


def test_the_command_measures_each_variant_and_goes_on_after_one_that_does_not_fit(config_file, tmp_path):
    path = tmp_path / "bench.json"
    done = run_command(config_file, "--compile_only", "--vary", "model.num_heads=4,3", f"--json={path}")
    assert (done.returncode, done.stdout) == (2, "")  # 3 heads do not divide the width: refused at once
    assert done.stderr.startswith("error: model.hidden_size=32") and not path.exists()

    arguments = ["--compile_only", "--config.mesh.fsdp=2", "--vary", "data.batch_size=3,4", f"--json={path}"]
    done = run_command(config_file, *arguments)  # how many devices there are, only a variant's process can tell
    assert done.returncode == 2, done.stdout + done.stderr
    refused, measured = json.loads(path.read_text())["runs"]
    assert "data.batch_size=3 is not a multiple of mesh.fsdp=2" in refused["error"]
    assert measured["config"]["data"]["batch_size"] == 4 and measured["compile_seconds"]["outer_step"] > 0
    assert "failed: data.batch_size=3" in done.stdout
