"""Figures of the benchmark, against independent ones."""

import json
from pathlib import Path

import jax
import pytest

from noloco_jax.metrics.peaks import Peak
from noloco_jax.tools.bench import measure as module
from noloco_jax.tools.bench.measure import measure
from support.benchmarks import SMALL, TINY, small

# By hand: embedding and head, attention's q, k, v, o, the MLP's three, three norms.
PARAMETERS = 2 * 259 * 16 + 16 * (16 + 8 + 8 + 16) + 3 * 16 * 32 + 3 * 16
FLOPS_PER_TOKEN = 3 * (2 * (259 * 16 + 16 * (16 + 8 + 8 + 16) + 3 * 16 * 32) + 2 * 8 * 16)


def test_a_measured_run_has_every_figure_and_they_agree(result):
    step, outer = result["step_seconds"], result["outer_step_seconds"]
    assert 0 < step["lower_quartile"] <= step["median"] <= step["upper_quartile"]
    assert 0 < outer["lower_quartile"] <= outer["median"] <= outer["upper_quartile"]
    assert result["tokens_per_second"] == pytest.approx(4 * 2 * 8 / step["median"])
    assert result["model_flops_per_token"] == FLOPS_PER_TOKEN
    assert result["model_flops_per_second"] == pytest.approx(result["tokens_per_second"] * FLOPS_PER_TOKEN)
    assert result["mfu"] is None  # a CPU has no published peak
    assert result["bytes_sent"] == 4 * PARAMETERS
    assert result["data_tokens_per_second"] > 0
    assert result["data_missing"] == ""
    assert set(result["compile_seconds"]) == {"inner_step", "outer_step"}
    assert json.loads(json.dumps(result)) == result


def test_the_outer_share_counts_the_outer_steps_of_every_fragment_and_mfu_the_devices(monkeypatch):
    monkeypatch.setattr(module, "peak_of", lambda kind, dtype: Peak(1e12, "a page"))
    result = measure(small(model=TINY, outer={"sync_every": 4, "fragments": 2}, num_steps=100), steps=3)
    step, outer = (result[name]["median"] for name in ("step_seconds", "outer_step_seconds"))
    outer_steps = 2 * 100 // 4
    assert result["outer_share"] == pytest.approx(outer_steps * outer / (outer_steps * outer + 100 * step))
    assert result["mfu"] == pytest.approx(result["model_flops_per_second"] / 2e12)


def test_peak_memory_is_that_of_a_program_and_the_state_beside_it(result):
    programs = result["program_memory_bytes"]
    replicas = 2  # per device
    inner, outer = programs["inner_step"], programs["outer_step"]
    # Adam: two moments and two counters a replica; outer: slow weights and momentum a replica, one counter.
    assert outer["beside"] == replicas * (8 * PARAMETERS + 8)
    assert inner["beside"] == replicas * 8 * PARAMETERS + 2 * 4  # two counters
    for program in (inner, outer):
        held = program["arguments"] + program["temporaries"] + program["outputs"] - program["aliased"]
        assert program["total"] == held
    assert result["peak_memory_bytes"] == max(program["total"] + program["beside"] for program in programs.values())
    batch = 2 * replicas * 2 * 8 * 4
    assert inner["arguments"] >= replicas * 12 * PARAMETERS + batch


def test_methods_without_outer_steps_have_no_outer_figures(ddp_result):
    assert ddp_result["outer_step_seconds"] is None and ddp_result["outer_share"] is None
    assert ddp_result["pairings"] is None
    assert ddp_result["bytes_sent"] == 2 * 4 * (PARAMETERS + 1) * 3 // 4  # gradients, and the number of labels
    assert set(ddp_result["compile_seconds"]) == {"inner_step"}


def test_missing_data_leave_the_other_figures_measured(ddp_result):
    assert ddp_result["data_tokens_per_second"] is None
    assert "data.path" in ddp_result["data_missing"]
    assert ddp_result["tokens_per_second"] > 0


def test_a_trace_is_written_for_both_viewers(ddp_result):
    [folder] = Path(ddp_result["profile"]).glob("plugins/profile/*")
    assert len(list(folder.glob("*.xplane.pb"))) == 1
    assert (folder / "perfetto_trace.json.gz").stat().st_size > 1000


def test_an_offloaded_outer_state_takes_no_device_memory_in_inner_steps(result, monkeypatch):
    kinds = set()  # of the memories that arrays were put from
    transfer = jax.device_put

    def recorded(x, *arguments, **options):
        kinds.update(leaf.sharding.memory_kind for leaf in jax.tree.leaves(x) if isinstance(leaf, jax.Array))
        return transfer(x, *arguments, **options)

    monkeypatch.setattr(jax, "device_put", recorded)
    offloaded = measure(small(outer=SMALL["outer"] | {"offload": True}), steps=3)
    on_device = result["program_memory_bytes"]
    inner_step = on_device["inner_step"] | {"beside": 0}
    assert offloaded["program_memory_bytes"] == on_device | {"inner_step": inner_step}
    assert "pinned_host" in kinds, "timed outer steps read the state from the host"


def test_compiling_only_allocates_nothing_and_counts_the_pairings(monkeypatch):
    monkeypatch.setattr(module.TimedRun, "__init__", lambda *_: pytest.fail("nothing is to run"))
    result = measure(small(model=TINY), steps=3, compile_only=True)
    assert result["pairings"] == 3
    assert result["peak_memory_bytes"] > 0
    assert "step_seconds" not in result
