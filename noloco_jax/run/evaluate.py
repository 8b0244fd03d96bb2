"""Validation: perplexity of every replica and of the merged model, and the replica spread; for an island, its own."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from noloco_jax.data import HostBatch
from noloco_jax.labels import IGNORED_LABEL
from noloco_jax.spmd.batches import place_batch
from noloco_jax.spmd.programs import Programs

PyTree = Any


def evaluate(programs: Programs, params: PyTree, batches: Sequence[HostBatch]) -> dict[str, Any]:
    """Evaluate all replicas and their mean on the same sequences. Blocks, and communicates between replicas.

    Args:
      programs: the run's programs.
      params: fast weights, the replicas in front.
      batches: batches of one replica, as the programs take them; equal on every process.

    Returns:
      `perplexity`: exp of the token loss averaged over the replicas; `perplexity_replicas`: each replica's;
      `perplexity_merged`: that of the plain mean of their weights; `replica_spread`: sqrt(Σ|mean − θ_i|²/(numel · N)).
    """
    losses, num_replicas = _replica_losses(programs, params, batches), programs.batch["input_ids"].shape[0]
    # The merged model is equal on all replicas, so each of them evaluates different batches.
    nothing = batches[0] | {"labels": np.full_like(batches[0]["labels"], IGNORED_LABEL)}
    rounds = [batches[start : start + num_replicas] for start in range(0, len(batches), num_replicas)]
    rounds = [[*part, *[nothing] * (num_replicas - len(part))] for part in rounds]
    merged_sum, merged_tokens = _losses(programs, programs.merge(params), rounds).sum(axis=1)
    with np.errstate(over="ignore"):  # the perplexity of a diverged replica is infinite
        perplexity, perplexities = np.exp(losses.mean()), np.exp(losses)
        merged = np.exp(merged_sum / merged_tokens)
    return {
        "perplexity": float(perplexity),
        "perplexity_replicas": perplexities.tolist(),
        "perplexity_merged": float(merged),
        "replica_spread": float(programs.spread(params)),
    }


def own_perplexity(programs: Programs, params: PyTree, batches: Sequence[HostBatch]) -> float:
    """Return exp of the token loss of a run's only replica; the arguments are those of `evaluate`. Blocks."""
    (loss,) = _replica_losses(programs, params, batches)
    with np.errstate(over="ignore"):
        return float(np.exp(loss))


def _replica_losses(programs: Programs, params: PyTree, batches: Sequence[HostBatch]) -> np.ndarray:
    """Return the mean token loss of every replica on the same batches, float64 (N,)."""
    num_replicas = programs.batch["input_ids"].shape[0]
    sums, tokens = _losses(programs, params, [[batch] * num_replicas for batch in batches])
    return sums / tokens


def _losses(programs: Programs, params: PyTree, rounds: Sequence[Sequence[HostBatch]]) -> np.ndarray:
    """Return the summed loss and the number of tokens of every replica over its batches, float64 (2, N)."""
    total = np.zeros((2, len(rounds[0])))
    waiting = None
    for part in rounds:
        result = programs.evaluate(params, place_batch(dict(enumerate(part)), programs.batch))
        # At most two programs are in flight: CPU devices share threads, and many waiting programs would block them all.
        if waiting is not None:
            total += np.asarray(jax.device_get(waiting), np.float64)
        waiting = result
    return total + np.asarray(jax.device_get(waiting), np.float64)
