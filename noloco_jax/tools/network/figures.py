"""Figures of a run on a slow network, from its metrics.jsonl."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from noloco_jax.config import TrainConfig
from noloco_jax.metrics.writer import read_metrics


@dataclass(frozen=True)
class Figures:
    """Figures of a run on its links; seconds are without those of evaluations.

    Attributes:
      step_seconds: of an inner step, its share of the exchanges included.
      exchange_bytes: that a replica sends in an exchange.
      exchanges_per_step: number of them.
      compute_seconds: of an inner step alone, with as many processes on the same machine.
      tokens_per_step: tokens of all replicas.
      curve: (E, 2) seconds since the first step, and perplexity, of every evaluation.
    """

    step_seconds: float
    exchange_bytes: float
    exchanges_per_step: float
    compute_seconds: float
    tokens_per_step: int
    curve: np.ndarray

    @property
    def computing(self) -> float:
        """Share of the time in which inner steps are computed."""
        return min(self.compute_seconds / self.step_seconds, 1.0)

    @property
    def exchange_seconds(self) -> float:
        """Seconds by which an exchange makes the run longer."""
        return max(self.step_seconds - self.compute_seconds, 0.0) / self.exchanges_per_step

    def seconds_to(self, perplexity: float) -> float:
        """Return the seconds until the perplexity is reached, between evaluations by its logarithm; or infinity."""
        seconds, values = self.curve.T
        reached = np.flatnonzero(values <= perplexity)
        if not len(reached):
            return math.inf
        last = int(reached[0])
        if last == 0:
            return float(seconds[0])
        here = slice(last - 1, last + 1)
        return float(np.interp(-math.log(perplexity), -np.log(values[here]), seconds[here]))


def step_seconds(workdir: Path) -> float:
    """Return the mean seconds of the inner steps between the first and the last logged one, without evaluations."""
    metrics = read_metrics(workdir)
    return _step_seconds([line for line in metrics if line["kind"] == "train"], _evaluations(metrics))


def figures_of(workdir: Path, config: TrainConfig, compute_seconds: float) -> Figures:
    """Return the figures of a finished run.

    Args:
      workdir: of the run, or of one of its islands.
      config: the run's.
      compute_seconds: of an inner step alone.
    """
    metrics = read_metrics(workdir)
    steps, evaluations = [line for line in metrics if line["kind"] == "train"], _evaluations(metrics)
    outer = [line for line in steps if line.get("outer_steps")]
    step = _step_seconds(steps, evaluations)
    if outer:
        number = sum(line["outer_steps"] for line in outer)
        sent, per_step = sum(line["bytes_sent"] for line in outer) / number, number / steps[-1]["step"]
    else:  # gradients, at every step
        sent, per_step = steps[-1].get("bytes_sent_inner_step", 0), 1.0
    training = np.cumsum([line["evaluation_seconds"] for line in evaluations])
    curve = [(line["seconds"] - before, line["perplexity"]) for line, before in zip(evaluations, training, strict=True)]
    return Figures(step, sent, per_step, compute_seconds, config.tokens_per_step, np.array(curve))


def _evaluations(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in metrics if line["kind"] == "eval"]


def _step_seconds(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> float:
    first, last = steps[0], steps[-1]
    evaluating = sum(line["evaluation_seconds"] for line in evaluations if first["step"] <= line["step"] < last["step"])
    return (last["seconds"] - first["seconds"] - evaluating) / (last["step"] - first["step"])
