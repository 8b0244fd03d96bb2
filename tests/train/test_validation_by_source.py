"""Validation of each source of a mixture, against an evaluation on that source alone."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.config import MeshConfig, TrainConfig, load_saved
from noloco_jax.data import ByteTokenizer
from noloco_jax.metrics.evaluate import Validation, evaluate
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import build_programs, shardings_of
from support import processes
from support.data_makers import validation_batches, write_json_lines

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def mixture(config) -> tuple[str, ...]:
    """Return flags that replace the run's data by a mixture: its text files, and JSON lines of numbers."""
    folder = config.parent / "numbers"
    folder.mkdir()
    write_json_lines(folder / "train.jsonl", [" ".join(map(str, range(k, k + 60))) for k in range(0, 4000, 60)])
    write_json_lines(folder / "validation.jsonl", [" ".join(map(str, range(k, k + 70))) for k in range(30, 2000, 70)])
    text, numbers = "--config.data.mixture.text", "--config.data.mixture.numbers"
    return (
        "--config.checkpoint_every=12",
        *("--config.data.kind=mixture", "--config.data.path=", "--config.data.validation_path="),
        *(f"{text}.kind=text", f"{text}.weight=3", f"{text}.path={config.parent / 'data'}"),
        f"{text}.validation_path={config.parent / 'held_out'}",
        *(f"{numbers}.kind=jsonl", f"{numbers}.weight=1.0", f"{numbers}.path={folder}"),
    )


def evaluate_on_source(workdir: Path, name: str) -> dict[str, Any]:
    """Evaluate the newest checkpoint's replicas on the validation data of one source."""
    mixed = load_saved(workdir)
    source = mixed.data.mixture[name]
    data = replace(
        TrainConfig().data,
        **{field: getattr(source, field) for field in ("kind", "path", "validation_path")},
        **{field: getattr(mixed.data, field) for field in ("sequence_length", "batch_size", "shuffle_buffer")},
    )
    with Checkpointer(workdir, mixed, read_only=True) as checkpoints:
        newest = checkpoints.newest()
        assert newest is not None
        params = newest.params()
    config = replace(mixed, data=data, mesh=MeshConfig(replica=1))
    programs = build_programs(config, make_mesh(config, jax.devices()[:1]))
    params = jax.device_put(params, shardings_of(programs.state.params))
    batches = validation_batches(data, ByteTokenizer(), num_batches=config.eval_batches)
    return evaluate(programs, params, Validation(batches))


def test_each_source_is_named_and_evaluated_as_if_it_were_the_only_one(config, mixture):
    workdir = config.parent / "run"
    [(status, output)] = processes.run(config, workdir, "--config.mesh.replica=1", *mixture)
    assert status == 0, output
    assert re.search(r"^data +25 % numbers: jsonl in .*\n +75 % text: text in ", output, re.MULTILINE), output
    found = [line for line in processes.metrics(workdir) if line["kind"] == "eval"][-1]
    assert set(found["perplexity_by_source"]) == {"text", "numbers"}
    for name in ("text", "numbers"):
        alone = evaluate_on_source(workdir, name)
        assert found["perplexity_by_source"][name] == pytest.approx(alone["perplexity"], rel=1e-6)
        assert found["perplexity_merged_by_source"][name] == pytest.approx(alone["perplexity_merged"], rel=1e-6)
    low, high = sorted(found["perplexity_by_source"].values())
    assert high > 1.05 * low and low < found["perplexity"] < high
