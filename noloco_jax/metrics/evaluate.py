"""Validation: perplexity of every replica and of the merged model, and the replica spread; for an island, its own."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from noloco_jax.data import HostBatch, RunData, Tokenizer
from noloco_jax.data.source import IGNORED_LABEL
from noloco_jax.spmd.batches import place_batch
from noloco_jax.spmd.programs import Programs

PyTree = Any


class Validation(NamedTuple):
    """Batches of one replica to evaluate on, as the programs take them; equal on every process.

    Attributes:
      batches: those of the data as they are trained on.
      by_source: name of a source of a mixture -> batches of it alone; empty for other data.
    """

    batches: Sequence[HostBatch]
    by_source: Mapping[str, Sequence[HostBatch]] = {}


def read_validation(data: RunData, tokenizer: Tokenizer | None, num_batches: int) -> Validation:
    """Read the first validation batches of a run's data; raise `UserError` as `RunData` does."""
    return Validation(
        data.validation_batches(tokenizer, num_batches), data.validation_by_source(tokenizer, num_batches)
    )


def evaluate(programs: Programs, params: PyTree, validation: Validation) -> dict[str, Any]:
    """Evaluate all replicas and their mean on the same sequences. Blocks, and communicates between replicas.

    Args:
      programs: the run's programs.
      params: fast weights, the replicas in front.
      validation: the batches.

    Returns:
      `perplexity`: exp of the token loss averaged over the replicas; `perplexity_replicas`: each replica's;
      `perplexity_merged`: that of the plain mean of their weights; `replica_spread`: sqrt(Σ|mean − θ_i|²/(numel · N)).
      Of a mixture also `perplexity_by_source` and `perplexity_merged_by_source`: name of a source -> the first and the
      third of these on its batches.
    """
    sources = validation.by_source
    losses = _replica_losses(programs, params, validation.batches)
    figures = {
        "perplexity": perplexity_of(losses.mean()),
        "perplexity_replicas": [perplexity_of(loss) for loss in losses],
    }
    merged = programs.merge(params)
    figures["perplexity_merged"] = _merged_perplexity(programs, merged, validation.batches)
    if sources:
        figures["perplexity_by_source"] = {
            name: perplexity_of(_replica_losses(programs, params, sources[name]).mean()) for name in sources
        }
        figures["perplexity_merged_by_source"] = {
            name: _merged_perplexity(programs, merged, sources[name]) for name in sources
        }
    del merged  # for its memory
    return figures | {"replica_spread": float(programs.spread(params))}


def evaluate_alone(programs: Programs, params: PyTree, validation: Validation) -> dict[str, Any]:
    """Evaluate a run's only replica: `perplexity` and, of a mixture, `perplexity_by_source` of `evaluate`. Blocks."""
    found: dict[str, Any] = {"perplexity": _own_perplexity(programs, params, validation.batches)}
    if validation.by_source:
        found["perplexity_by_source"] = {
            name: _own_perplexity(programs, params, batches) for name, batches in validation.by_source.items()
        }
    return found


def loss_of_one(programs: Programs, params: PyTree, batches: Iterable[HostBatch]) -> tuple[float, int]:
    """Return the summed token loss, in nats, and the number of tokens of a run's only replica. Blocks."""
    (summed,), (tokens,) = _losses(programs, params, ([batch] for batch in batches))
    return float(summed), int(tokens)


def _own_perplexity(programs: Programs, params: PyTree, batches: Sequence[HostBatch]) -> float:
    """Return exp of the token loss of a run's only replica."""
    (loss,) = _replica_losses(programs, params, batches)
    return perplexity_of(loss)


def perplexity_of(loss: float | np.floating) -> float:
    """Return exp of a mean token loss."""
    with np.errstate(over="ignore"):  # the perplexity of a diverged replica is infinite
        return float(np.exp(loss))


def _merged_perplexity(programs: Programs, merged: PyTree, batches: Sequence[HostBatch]) -> float:
    """Return the perplexity of a model that is equal on all replicas: each of them evaluates different batches."""
    num_replicas = programs.batch["input_ids"].shape[0]
    nothing = batches[0] | {"labels": np.full_like(batches[0]["labels"], IGNORED_LABEL)}
    rounds = [batches[start : start + num_replicas] for start in range(0, len(batches), num_replicas)]
    rounds = [[*part, *[nothing] * (num_replicas - len(part))] for part in rounds]
    summed, tokens = _losses(programs, merged, rounds).sum(axis=1)
    return perplexity_of(summed / tokens)


def _replica_losses(programs: Programs, params: PyTree, batches: Sequence[HostBatch]) -> np.ndarray:
    """Return the mean token loss of every replica on the same batches, float64 (N,)."""
    num_replicas = programs.batch["input_ids"].shape[0]
    sums, tokens = _losses(programs, params, [[batch] * num_replicas for batch in batches])
    return sums / tokens


def _losses(programs: Programs, params: PyTree, rounds: Iterable[Sequence[HostBatch]]) -> np.ndarray:
    """Return the summed loss and the number of tokens of every replica over its batches, float64 (2, N).

    Processes add up the figures of their own replicas, and exchange the sums at the end alone: a message for every
    batch would take its round trips each time.
    """
    total = np.zeros((2, programs.batch["input_ids"].shape[0]))
    waiting = None
    for part in rounds:
        result = programs.evaluate(params, place_batch(dict(enumerate(part)), programs.batch))
        # At most two programs are in flight: CPU devices share threads, and many waiting programs would block them all.
        if waiting is not None:
            _add_own(total, waiting)
        waiting = result
    if waiting is not None:
        _add_own(total, waiting)
    # As words of 32 bits, since JAX would round float64 numbers. Each figure is one process's, and zero in the others.
    words = multihost_utils.process_allgather(total.view(np.uint32), tiled=False)
    return np.asarray(words).view(np.float64).reshape(-1, *total.shape).sum(axis=0)


def _add_own(total: np.ndarray, result: tuple[jax.Array, jax.Array]) -> None:
    """Add the figures of this process's replicas; of several copies in the run's processes one counts."""
    for row, figure in zip(total, result, strict=True):
        for shard in figure.addressable_shards:
            if shard.replica_id == 0:
                row[shard.index] += np.asarray(shard.data, np.float64)
