"""Validation of each source of a mixture in a run; `spmd/test_programs` compares its figures with a source alone."""

import re

import pytest

from support import processes
from support.data_makers import write_json_lines

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


def test_each_source_is_named_and_evaluated(config, mixture):
    workdir = config.parent / "run"
    [(status, output)] = processes.run(config, workdir, "--config.mesh.replica=1", *mixture)
    assert status == 0, output
    assert re.search(r"^data +25 % numbers: jsonl in .*\n +75 % text: text in ", output, re.MULTILINE), output
    found = [line for line in processes.metrics(workdir) if line["kind"] == "eval"][-1]
    assert set(found["perplexity_by_source"]) == {"text", "numbers"}
    by_source = found["perplexity_by_source"]
    assert found["perplexity_merged_by_source"].keys() == by_source.keys()
    assert 1.05 * by_source["text"] < by_source["numbers"]  # three quarters of the tokens are text
    assert by_source["text"] < found["perplexity"] < by_source["numbers"]
