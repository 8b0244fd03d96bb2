"""Pipeline over devices with random routing between replicas: every stage of a replica has devices of its own.

One program runs on all devices (arXiv 2506.10911, Section 3). At tick t, stage s works on micro-batch t - s, and all
stages send their results to the next stage of the replica that the tick's route names. All M micro-batches are finished
after M + S - 1 ticks: a bubble of (S - 1)/(M + S - 1). JAX's transposition routes the gradient back.

Every stage holds one part of its replica's vocabulary (`stages`). Before the ticks all stages look up their own tokens
of all micro-batches, and the sum over the stages is the input of the first. After the ticks the hidden states of the
last stage go to all stages of its replica, each of which computes the logits of its own tokens.

Axes: L replicas of a device, M micro-batches, B sequences of one, T positions, D hidden width, V tokens of one stage.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from noloco_jax.config import ModelConfig
from noloco_jax.model.architecture import from_params, stages_of
from noloco_jax.model.loss import token_nll
from noloco_jax.optim.exchange.permute import Routes, device_routes, permute_blocks
from noloco_jax.optim.exchange.swap import NOWHERE
from noloco_jax.spmd.gradients import Batch, merge_microbatches, num_labels, split_microbatches, widened
from noloco_jax.spmd.stages import sum_over_stages

PyTree = Any
DEVICES = ("replica", "stage")  # in the order in which the routes number devices


def stage_routes(pool: np.ndarray, num_devices: int, num_slots: int) -> Routes:
    """Compute messages between all stages of all replicas, N = num_devices · num_slots, of routes (pool, S - 1, N).

    A stage of a replica is one item on the device (device of the replica, stage). The last stage sends nothing.
    """
    num_boundaries = pool.shape[1]
    num_stages = num_boundaries + 1
    replicas = np.arange(num_devices * num_slots)

    def item(replica: np.ndarray, stage: int) -> np.ndarray:
        device, slot = np.divmod(replica, num_slots)
        return (device * num_stages + stage) * num_slots + slot

    sources = np.zeros((len(pool), num_devices * num_stages * num_slots), int)
    for entry, routes in enumerate(pool):
        for stage in range(num_boundaries):
            sources[entry, item(routes[stage], stage + 1)] = item(replicas, stage)
        sources[entry, item(replicas, 0)] = item(replicas, num_boundaries)  # closes the permutation and is not sent
    of_devices = device_routes(sources, num_devices * num_stages, num_slots)

    def open_end(destinations: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(NOWHERE if there % num_stages == 0 else there for there in destinations)

    patterns = tuple(tuple((open_end(there), count) for there, count in pattern) for pattern in of_devices.patterns)
    return of_devices._replace(patterns=patterns)


def routed_nll(
    model: ModelConfig,
    num_microbatches: int,
    pool: np.ndarray,
    params: PyTree,
    batch: Batch,
    weight_L: jax.Array,
    routes: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run this device's part of the schedule. For use inside `shard_map` over `replica` and `stage`.

    Args:
      model: the model.
      num_microbatches: M.
      pool: (pool, S - 1, N), see `routes.route_pool`.
      params: this stage's part of the parameters, the vocabulary padded to a multiple of S; the device's L replicas in
        front.
      batch: (L, M·B, T), batches of the device's replicas, on each of their stages.
      weight_L: float32, the weight of a label's loss in each of these batches.
      routes: int32 (M + S - 1,), the pool entry of each tick.

    Returns:
      (summed loss, number of labels, auxiliary loss), float32 (L,), the first two attributed to the replica whose last
      stage computed the hidden states and equal on all of its stages, the third of this stage's layers. Losses carry
      the weights of the batches they come from.
    """
    stage, num_stages = lax.axis_index("stage"), lax.axis_size("stage")
    messages = stage_routes(pool, lax.axis_size("replica"), batch["labels"].shape[0])
    fields = stages_of(model)
    vocabulary = {name: params[name] for name in (fields.embedding, fields.head)}
    layers, narrowed = widened(params[fields.layers])

    def look_up(slot: tuple[PyTree, jax.Array]) -> jax.Array:
        """Return the embeddings of this stage's tokens, and zeros for all others."""
        part, ids_BT = slot
        num_own = part[fields.embedding].shape[0]
        own_BT = ids_BT // num_own == stage
        return jnp.where(own_BT[..., None], from_params(model, part).embed_tokens(ids_BT % num_own), 0)

    def run(h_LBTD: jax.Array, segments_LBT: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        def one(slot):
            blocks, h_BTD, segments_BT = slot
            return from_params(model, {fields.layers: narrowed(blocks)}).run_blocks_in_training(
                h_BTD, segments_BT=segments_BT
            )

        return lax.map(one, (layers, h_LBTD, segments_LBT))

    if model.remat == "stage":
        run = jax.checkpoint(run, prevent_cse=False)

    def tick(arrived: PyTree, step: tuple[jax.Array, PyTree]):
        route, entering = step
        h_LBTD, segments_LBT, *which = jax.tree.map(lambda new, old: jnp.where(stage == 0, new, old), entering, arrived)
        h_LBTD, auxiliary_L = run(h_LBTD, segments_LBT)
        labels_LBT, weight_L = which
        auxiliary_L *= weight_L * num_labels(labels_LBT)  # without a micro-batch the weight is 0
        return permute_blocks((h_LBTD, segments_LBT, *which), messages, route, DEVICES), (h_LBTD, *which, auxiliary_L)

    def score(slot):
        part, h_BTD, labels_BT, weight_B = slot
        kernel_DV = from_params(model, part).head_kernel()
        return token_nll(h_BTD, kernel_DV, labels_BT, weight_B, vocab_size=model.vocab_size, axis_name="stage")

    parts = jax.tree.map(lambda x: split_microbatches(x, num_microbatches), batch)
    ids_MLBT = parts["input_ids"]
    h_MLBTD = sum_over_stages(jax.vmap(lambda ids_LBT: lax.map(look_up, (vocabulary, ids_LBT)))(ids_MLBT))
    is_token_MLBT = (ids_MLBT >= 0) & (ids_MLBT < model.vocab_size)
    h_MLBTD = jnp.where(is_token_MLBT[..., None], h_MLBTD, jnp.nan)  # as in a whole model
    weight_ML = jnp.broadcast_to(weight_L, (num_microbatches, *weight_L.shape))
    entering = (h_MLBTD, parts.get("segment_ids"), parts["labels"], weight_ML)
    entering = jax.tree.map(lambda x: _append_zeros(x, num_stages - 1), entering)
    nothing = jax.tree.map(lambda x: jnp.zeros_like(x[0]), entering)
    _, (*made, auxiliary_ML) = lax.scan(tick, nothing, (routes, entering))

    # All micro-batches are scored as one, since the head's gradient is as large as the head and would be kept for each.
    h_MLBTD, labels_MLBT, weight_ML = jax.tree.map(lambda x: x[num_stages - 1 :], made)
    weight_MLB = jnp.broadcast_to(weight_ML[..., None], labels_MLBT.shape[:3])
    h_LBTD, labels_LBT, weight_LB = map(merge_microbatches, (h_MLBTD, labels_MLBT, weight_MLB))
    h_LBTD = jax.vmap(lambda h_BTD, norm_D: from_params(model, {fields.norm: norm_D}).final_norm(h_BTD))(
        h_LBTD, params[fields.norm]
    )
    through = _from_last_stage((h_LBTD, labels_LBT, weight_LB))
    return *lax.map(score, (vocabulary, *through)), auxiliary_ML.sum(axis=0)


def _append_zeros(x: jax.Array, number: int) -> jax.Array:
    return jnp.concatenate([x, jnp.zeros_like(x, shape=(number, *x.shape[1:]))])


def _from_last_stage(tree: PyTree) -> PyTree:
    """Broadcast a tree from the last stage to every stage of its replica."""
    is_last = lax.axis_index("stage") == lax.axis_size("stage") - 1
    return sum_over_stages(jax.tree.map(lambda x: jnp.where(is_last, x, jnp.zeros_like(x)), tree))
