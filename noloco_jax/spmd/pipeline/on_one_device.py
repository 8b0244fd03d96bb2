"""Pipeline with random routing on one device, without schedule or messages: the readable equivalent of `over_devices`.

Axes: N replicas, M micro-batches, B sequences of one, T positions, D hidden width.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noloco_jax.config import ModelConfig
from noloco_jax.model.architecture import from_params, stages_of
from noloco_jax.model.loss import token_nll
from noloco_jax.spmd.gradients import Batch, merge_microbatches, num_labels, split_microbatches, widened

PyTree = Any


def routed_nll(
    model: ModelConfig,
    num_stages: int,
    num_microbatches: int,
    pool: np.ndarray,
    params: PyTree,
    batch: Batch,
    weight_N: jax.Array,
    routes: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run every micro-batch through the stages of the replicas that it is routed to.

    Args:
      model: the model.
      num_stages: S.
      num_microbatches: M.
      pool: (pool, S - 1, N), see `routes.route_pool`.
      params: the model's, the N replicas in front.
      batch: (N, M·B, T).
      weight_N: float32, the weight of a label's loss in each of these batches.
      routes: int32 (M + S - 1,), the pool entry of each tick.

    Returns:
      (summed loss, number of labels, auxiliary loss), float32 (N,), the first two attributed to the replica whose last
      stage scored them, the third to those whose layers it comes from. Losses carry the weights of the batches they
      come from.
    """
    sources = jnp.asarray(np.argsort(pool, axis=-1))  # the sender of each replica; the pool lists the receivers
    layers_a_stage = model.num_layers // num_stages
    fields = stages_of(model)
    layers, narrow_layers = widened(params[fields.layers])
    embedding, narrow_embedding = widened({fields.embedding: params[fields.embedding]})

    def run(slot: tuple[PyTree, jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array]:
        blocks, h_BTD, segments_BT = slot
        return from_params(model, {fields.layers: narrow_layers(blocks)}).run_blocks_in_training(
            h_BTD, segments_BT=segments_BT
        )

    if model.remat == "stage":
        run = jax.checkpoint(run)

    def enter(slot):
        table, ids_BT = slot
        return from_params(model, narrow_embedding(table)).embed_tokens(ids_BT)

    def microbatch(_, part):
        m, parts_NBT = part
        h_NBTD = jax.lax.map(enter, (embedding, parts_NBT["input_ids"]))
        routed = (parts_NBT.get("segment_ids"), parts_NBT["labels"], weight_N)
        auxiliary_N = jnp.zeros_like(weight_N)
        for stage in range(num_stages):
            chosen = slice(stage * layers_a_stage, (stage + 1) * layers_a_stage)
            blocks = jax.tree.map(lambda x, chosen=chosen: x[:, chosen], layers)
            h_NBTD, of_layers_N = jax.lax.map(run, (blocks, h_NBTD, routed[0]))
            auxiliary_N += of_layers_N * routed[2] * num_labels(routed[1])
            if stage < num_stages - 1:
                source_N = sources[routes[m + stage], stage]
                h_NBTD, *routed = jax.tree.map(lambda x, source_N=source_N: x[source_N], (h_NBTD, *routed))
        return None, (h_NBTD, *routed[1:], auxiliary_N)

    def score(slot):
        replica, h_BTD, labels_BT, weight_B = slot
        end = from_params(model, replica)
        return token_nll(end.final_norm(h_BTD), end.head_kernel(), labels_BT, weight_B)

    parts_MNBT = jax.tree.map(lambda x: split_microbatches(x, num_microbatches), batch)
    _, made = jax.lax.scan(microbatch, None, (jnp.arange(num_microbatches), parts_MNBT))
    h_MNBTD, labels_MNBT, weight_MN, auxiliary_MN = made
    weight_MNB = jnp.broadcast_to(weight_MN[..., None], labels_MNBT.shape[:3])
    ends = {name: params[name] for name in (fields.embedding, fields.norm, fields.head)}
    scored = jax.lax.map(score, (ends, *map(merge_microbatches, (h_MNBTD, labels_MNBT, weight_MNB))))
    return *scored, auxiliary_MN.sum(axis=0)
