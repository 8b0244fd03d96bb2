"""The pipeline with random routing between replicas, over devices: stage s of a replica on devices of their own.

One program runs on all devices (arXiv 2506.10911, Section 3). At tick t, stage s works on micro-batch t - s, and all
stages send what they made to the next stage of the replica that the tick's route names; after M + S - 1 ticks all M
micro-batches are through: a bubble of (S - 1)/(M + S - 1). The gradient retraces the routes by itself.

Axes: L replicas of a device, M micro-batches, B sequences of one, T positions, D hidden width, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from noloco_jax.config.fields import ModelConfig
from noloco_jax.exchange.permute import permute_blocks
from noloco_jax.exchange.routes import NOWHERE, Routes, lower
from noloco_jax.model.llama import Llama
from noloco_jax.model.loss import token_nll
from noloco_jax.spmd.gradients import Batch, joined, split

PyTree = Any
DEVICES = ("replica", "stage")  # in the order in which the routes number devices


def device_routes(pool: np.ndarray, num_devices: int, num_slots: int) -> Routes:
    """The routes (pool, S - 1, N) as messages between all stages of all replicas, N = num_devices · num_slots.

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
        sources[entry, item(replicas, 0)] = item(replicas, num_boundaries)  # to close the permutation: not sent
    lowered = lower(sources, num_devices * num_stages, num_slots)

    def open_end(destinations: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(NOWHERE if there % num_stages == 0 else there for there in destinations)

    patterns = tuple(tuple((open_end(there), count) for there, count in pattern) for pattern in lowered.patterns)
    return lowered._replace(patterns=patterns)


def routed_nll(
    model: ModelConfig,
    num_microbatches: int,
    pool: np.ndarray,
    params: PyTree,
    batch: Batch,
    weight_L: jax.Array,
    routes: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Runs this device's part of the schedule. For use inside `shard_map` over `replica` and `stage`.

    Args:
      model: the model.
      num_microbatches: M.
      pool: (pool, S - 1, N), see `routing.route_pool`.
      params: this stage's part of the `stages.cut` parameters, the L replicas of the device in front.
      batch: (L, M·B, T), of the device's replicas, on each of their stages.
      weight_L: float32, what the loss of a label in each of these batches counts.
      routes: int32 (M + S - 1,), the pool entry of each tick.

    Returns:
      float32 (L,), on the last stage of the replicas that scored them, zero on the other stages: the summed loss,
      weighted as the batches that it comes from; and the number of labels.
    """
    stage, last = lax.axis_index("stage"), lax.axis_size("stage") - 1
    messages = device_routes(pool, lax.axis_size("replica"), batch["labels"].shape[0])
    vocab_LVD, norm_LD = params["stage_vocab"][:, 0], params["stage_norm"][:, 0]
    parts_MLBT = jax.tree.map(lambda x: split(x, num_microbatches), batch)

    def enter(ids_LBT: jax.Array) -> jax.Array:
        def one(slot):
            vocab_VD, ids_BT = slot
            return Llama.from_params(model, {"embed": vocab_VD}).embed_tokens(ids_BT)

        return lax.map(one, (vocab_LVD, ids_LBT))

    def score(through: PyTree) -> tuple[jax.Array, jax.Array]:
        """All micro-batches as one: the head's gradient is as large as the head, and would be kept for each."""

        def one(slot):
            vocab_VD, norm_D, h_BTD, labels_BT, weight_B = slot
            end = Llama.from_params(model, {"norm": norm_D, "head": vocab_VD.T})
            return token_nll(end.final_norm(h_BTD), end.head_kernel(), labels_BT, weight_B)

        return lax.map(one, (vocab_LVD, norm_LD, *joined(*through)))

    def run(h_LBTD: jax.Array) -> jax.Array:
        def one(slot):
            blocks, h_BTD = slot
            return Llama.from_params(model, {"blocks": blocks}).run_blocks(h_BTD)

        return lax.map(one, (params["blocks"], h_LBTD))

    if model.remat == "stage":
        run = jax.checkpoint(run, prevent_cse=False)

    def tick(arrived, step):
        t, route = step
        ids_LBT, own_labels_LBT = (
            lax.dynamic_index_in_dim(parts_MLBT[name], jnp.minimum(t, num_microbatches - 1), keepdims=False)
            for name in ("input_ids", "labels")
        )
        # Real branches: no stage spends time on another's part, whose matrices are the largest there are.
        h_LBTD, *which = lax.cond(stage == 0, lambda: (enter(ids_LBT), own_labels_LBT, weight_L), lambda: arrived)
        made = (run(h_LBTD), *which)
        return permute_blocks(made, messages, route, DEVICES), made

    zero_L = jnp.zeros_like(weight_L)
    labels_LBT = parts_MLBT["labels"][0]
    nothing = (jnp.zeros((*labels_LBT.shape, model.hidden_size), model.dtype), jnp.zeros_like(labels_LBT), zero_L)
    _, made = lax.scan(tick, nothing, (jnp.arange(routes.shape[0]), routes))
    through = jax.tree.map(lambda x: x[last:], made)
    return lax.cond(stage == last, score, lambda _: (zero_L, zero_L), through)
