"""Figures of a run on a slow network, by hand from the lines of metrics.jsonl."""

import json
from pathlib import Path

import pytest

from noloco_jax.config import from_dict
from noloco_jax.tools.network.report import figures_of, step_seconds


def write(folder: Path, lines: list[dict]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"time": "", **line}) + "\n" for line in lines))
    return folder


def train(step: int, seconds: float, **more) -> dict:
    return {"kind": "train", "step": step, "seconds": seconds, **more}


def evaluation(step: int, seconds: float, own: float, perplexity: float) -> dict:
    figures = {"perplexity": perplexity, "evaluation_seconds": own}
    return {"kind": "eval", "step": step, "seconds": seconds, **figures}


OUTER = {"outer_steps": 2, "bytes_sent": 600.0, "outer_step_seconds": 1.0}
CONFIG = from_dict({"method": "noloco", "num_replicas": 2, "data": {"batch_size": 3, "sequence_length": 10}})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    # Steps of 0.5 s, and evaluations of 7 and 5 s after steps 20 and 30.
    lines = [train(10, 6.0, **OUTER), train(20, 11.0, **OUTER), evaluation(20, 18.0, 7.0, 16.0)]
    return write(tmp_path, [*lines, train(30, 23.0, **OUTER), evaluation(30, 28.0, 5.0, 4.0)])


def test_seconds_of_a_step_are_without_evaluations(run):
    assert step_seconds(run) == pytest.approx(0.5)


def test_an_exchange_takes_what_steps_take_longer_than_computing(run):
    figures = figures_of(run, CONFIG, compute_seconds=0.4)
    assert figures.exchange_bytes == 300
    assert figures.exchanges_per_step == pytest.approx(6 / 30)
    assert figures.exchange_seconds == pytest.approx(0.1 / 0.2)
    assert figures.computing == pytest.approx(0.8)


def test_time_to_a_perplexity_lies_between_evaluations_by_its_logarithm(run):
    figures = figures_of(run, CONFIG, compute_seconds=0.4)
    assert figures.curve.tolist() == [[11.0, 16.0], [16.0, 4.0]]
    assert figures.seconds_to(8.0) == pytest.approx(13.5)  # half-way from 16 to 4
    assert figures.seconds_to(20.0) == 11.0
    assert figures.seconds_to(3.9) == float("inf")


def test_gradients_of_every_step_are_its_exchange(tmp_path):
    lines = [train(step, 2.0 * step, bytes_sent_inner_step=800) for step in (10, 20)]
    config = from_dict({"method": "ddp", "num_replicas": 2})
    figures = figures_of(write(tmp_path, [*lines, evaluation(20, 41.0, 1.0, 9.0)]), config, compute_seconds=0.5)
    assert (figures.exchange_bytes, figures.exchange_seconds) == (800, 1.5)
