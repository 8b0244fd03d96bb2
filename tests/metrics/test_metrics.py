"""metrics.jsonl, and the same numbers in TensorBoard and wandb."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noloco_jax.errors import TransientError, UserError
from noloco_jax.metrics.writer import MetricWriter, read_metrics
from support.events import events
from support.fake_wandb import FakeWandb


def write(workdir: Path, steps: range, resume_step: int | None) -> bytes:
    """Write a line for each step; return the content of the file."""
    with MetricWriter(workdir, resume_step=resume_step, tensorboard=False) as writer:
        for step in steps:
            writer.write(step, "train", loss=1.0 / step)
    return (workdir / "metrics.jsonl").read_bytes()


def steps_read(workdir: Path) -> list[int]:
    return [entry["step"] for entry in read_metrics(workdir)]


def tensorboard(workdir: Path, name: str = "tensorboard") -> list[tuple[int, str, float]]:
    """Return (step, tag, value) of each scalar in the event files."""
    return [
        (event.step, value.tag, value.simple_value)
        for file in events(workdir, name)
        for event in file
        for value in event.summary.value
    ]


THIRD = np.float32(1) / np.float32(3)


@pytest.mark.parametrize(
    ("values", "read"),
    [
        ({"loss": np.float32(1.5), "lr": 6e-4}, {"loss": 1.5, "lr": 6e-4}),
        ({"all": np.array([1.5, 2.5], np.float32), "groups": [[0, 2]]}, {"all": [1.5, 2.5], "groups": [[0, 2]]}),
        ({"loss": THIRD}, {"loss": float(THIRD)}),
        ({"loss": float("nan"), "all": [1.0, float("inf")]}, {"loss": None, "all": [1.0, None]}),
    ],
    ids=["numbers", "arrays", "every bit", "non-finite values"],
)
def test_a_line_is_flushed_at_once_and_read_back(tmp_path, values, read):
    with MetricWriter(tmp_path, resume_step=None, tensorboard=False) as writer:
        writer.write(3, "train", **values)
        assert (tmp_path / "metrics.jsonl").read_text().startswith('{"step": 3, "kind": "train", ')
        assert read_metrics(tmp_path) == [{"step": 3, "kind": "train", **read}]


def test_a_resumed_run_drops_the_steps_that_it_will_write_again(tmp_path):
    write(tmp_path, range(1, 8), None)
    write(tmp_path, range(5, 7), 4)
    assert steps_read(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_sets_the_metrics_of_an_old_one_aside(tmp_path):
    former = write(tmp_path, range(1, 4), None)
    write(tmp_path, range(1, 2), None)
    assert steps_read(tmp_path) == [1] and (tmp_path / "metrics.jsonl.old").read_bytes() == former


@pytest.mark.parametrize(
    "torn", [b'{"step": 3, "ki', b'{"step": 3, "kind": "train"}', '{"step": 3, "text": "é'.encode()[:-1]]
)
def test_a_torn_last_line_is_skipped_and_removed_on_resume(tmp_path, torn):
    whole = write(tmp_path, range(1, 3), None)
    (tmp_path / "metrics.jsonl").write_bytes(whole + torn)
    assert steps_read(tmp_path) == [1, 2]
    assert write(tmp_path, range(0), 100) == whole


DAMAGED = {
    "torn": b'{"step": 2, "ki\n',
    "binary": bytes(range(256)) + b"\n",  # with a newline and every other byte that str.splitlines splits at
    "no object": b"3\n",
    "no kind": b'{"step": 2, "kinf": "train"}\n',
    "two in one": b'{"step": 2, "kind": "tr{"step": 3, "kind": "train"}\n',
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_damaged_lines_are_skipped_and_removed_on_resume(tmp_path, damage):
    path, whole = tmp_path / "metrics.jsonl", write(tmp_path, range(1, 4), None)
    first, second, third = whole.splitlines(keepends=True)
    path.write_bytes(first + second + damage + third)
    assert steps_read(tmp_path) == [1, 2, 3]
    assert write(tmp_path, range(0), 100) == whole


def test_reading_metrics_of_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        read_metrics(tmp_path)


def test_tensorboard_gets_one_series_for_every_entry_of_a_list_or_mapping_at_once(tmp_path):
    with MetricWriter(tmp_path, resume_step=None) as writer:
        writer.write(7, "eval", perplexity=2.0, each=[1.5, 2.5], by={2: 3.5}, groups=[[0, 1]], note="text")
        assert tensorboard(tmp_path) == [
            (7, "eval/perplexity", 2.0),
            (7, "eval/each/0", 1.5),
            (7, "eval/each/1", 2.5),
            (7, "eval/by/2", 3.5),
        ]


def test_a_new_run_sets_the_events_of_an_old_one_aside(tmp_path):
    for loss in (1.0, 2.0, 3.0):
        with MetricWriter(tmp_path, resume_step=None) as writer:
            writer.write(1, "train", loss=loss)
    assert tensorboard(tmp_path) == [(1, "train/loss", 3.0)]
    assert [value for _, _, value in tensorboard(tmp_path, "tensorboard.old")] == [2.0]


def test_a_resumed_run_marks_its_session_start_in_tensorboard(tmp_path):
    """At a session start, TensorBoard discards earlier events from that step on, over all files in name order."""
    for resume_step in (None, 1):
        with MetricWriter(tmp_path, resume_step=resume_step) as writer:
            writer.write(2, "train", loss=1.0)
    first, second = events(tmp_path)
    assert [event.step for event in first if event.HasField("session_log")] == []
    assert [(event.step, event.session_log.status) for event in second if event.HasField("session_log")] == [(2, 1)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_a_transient_error_naming_the_file(tmp_path, monkeypatch):
    writer = MetricWriter(tmp_path, resume_step=None, tensorboard=False)
    assert writer._file is not None
    writer._file.close()
    monkeypatch.setattr(writer, "_file", Path("/dev/full").open("w"))  # noqa: SIM115
    with writer, pytest.raises(TransientError, match=r"/dev/full .* cannot be written \(No space left on device\)"):
        writer.write(1, "train", loss=1.0)


def test_wandb_gets_the_same_numbers_and_a_resume_continues_its_run(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    options: dict[str, Any] = {"tensorboard": False, "wandb_project": "p", "run_config": {"seed": 1}}
    for resume_step in (None, 4, None):
        with MetricWriter(tmp_path, resume_step=resume_step, **options) as writer:
            writer.write(5, "train", loss=1.5)
    first, resumed, fresh = wandb.runs
    assert wandb.logged == [(5, {"train/loss": 1.5})] * 3
    assert (first["project"], first["config"], resumed["resume"]) == ("p", {"seed": 1}, "allow")
    assert first["id"] == resumed["id"] != fresh["id"]


def test_wandb_is_imported_only_if_asked_for_and_required_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        MetricWriter(tmp_path / "run", resume_step=None, wandb_project="p")
    assert not (tmp_path / "run").exists()
    MetricWriter(tmp_path, resume_step=None, tensorboard=False).close()
