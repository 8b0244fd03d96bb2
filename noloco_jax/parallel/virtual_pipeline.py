"""The pipeline with random routing on one device: no schedule, no messages. The readable twin of `pipeline`.

Axes: N replicas, M micro-batches, B sequences of one, T positions, D hidden width.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from noloco_jax.config import ModelConfig
from noloco_jax.model.llama import embed, head_kernel, rms_norm, run_layers
from noloco_jax.model.loss import token_nll
from noloco_jax.parallel.gradients import Batch, split, token_share

PyTree = Any


def routed_nll(
    model: ModelConfig, num_stages: int, num_microbatches: int, pool: np.ndarray, params: PyTree, batch: Batch, routes
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pushes every micro-batch through the stages of the replicas that it is routed to.

    Args:
      model: the model.
      num_stages: S.
      num_microbatches: M.
      pool: (pool, S - 1, N), see `routing.route_pool`.
      params: the model's, uncut, the N replicas in front.
      batch: (N, M·B, T).
      routes: int32 (M + S - 1,), the pool entry of each tick.

    Returns:
      By the replica whose last stage scored them, float32 (N,): each micro-batch's summed loss weighted by one over the
      number of labels in the batch that it comes from; the plain summed loss; and the number of labels.
    """
    sources = jnp.asarray(np.argsort(pool, axis=-1))  # from whom a replica receives, where the pool says to whom
    layers_a_stage = model.num_layers // num_stages

    def run(blocks_and_h: tuple[PyTree, jax.Array]) -> jax.Array:
        return run_layers(model, *blocks_and_h)

    if model.remat == "stage":
        run = jax.checkpoint(run)

    def microbatch(totals, part):
        m, parts_NBT, share_N = part
        h_NBTD = jax.lax.map(lambda slot: embed(model, *slot), (params, parts_NBT["input_ids"]))
        labels_NBT = parts_NBT["labels"]
        for stage in range(num_stages):
            chosen = slice(stage * layers_a_stage, (stage + 1) * layers_a_stage)
            blocks = jax.tree.map(lambda x, chosen=chosen: x[:, chosen], params["blocks"])
            h_NBTD = jax.lax.map(run, (blocks, h_NBTD))
            if stage < num_stages - 1:
                source_N = sources[routes[m + stage], stage]
                h_NBTD, labels_NBT, share_N = h_NBTD[source_N], labels_NBT[source_N], share_N[source_N]

        def score(slot):
            replica, h_BTD, labels_BT = slot
            return token_nll(rms_norm(h_BTD, replica["norm"], model.norm_eps), head_kernel(replica), labels_BT)

        ends = {name: params[name] for name in ("embed", "norm", "head") if name in params}
        nll_N, tokens_N = jax.lax.map(score, (ends, h_NBTD, labels_NBT))
        return jax.tree.map(jnp.add, totals, (nll_N * share_N, nll_N, tokens_N)), None

    share_N = token_share(batch)
    zero_N = jnp.zeros_like(share_N)
    parts_MNBT = jax.tree.map(lambda x: split(x, num_microbatches), batch)
    shares_MN = jnp.broadcast_to(share_N, (num_microbatches, *share_N.shape))
    steps = (jnp.arange(num_microbatches), parts_MNBT, shares_MN)
    return jax.lax.scan(microbatch, (zero_N, zero_N, zero_N), steps)[0]
