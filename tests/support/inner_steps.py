"""Inner steps of a configuration's replicas on one batch, on any number of devices."""

import dataclasses
from typing import Any

import jax
import numpy as np

from noloco_jax.config import TrainConfig
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import StepMetrics, build_programs
from support.layouts import some_devices


def losses(config: TrainConfig, num_devices: int, start: Any = None, **inner: Any) -> np.ndarray:
    """Return the losses (6, N) of six inner steps; arguments as of `metrics`."""
    return np.asarray(metrics(config, num_devices, start, **inner).loss)


def metrics(config: TrainConfig, num_devices: int, start: Any = None, **inner: Any) -> StepMetrics:
    """Return the metrics of six inner steps, arrays (6, N).

    Args:
      config: the run.
      num_devices: devices to take.
      start: parameters of one replica that all begin with; None: random ones.
      **inner: fields of `config.inner` to change.
    """
    inner = {"lr": 1e-2, "warmup_steps": 1} | inner
    config = dataclasses.replace(config, inner=dataclasses.replace(config.inner, **inner))
    programs = build_programs(config, make_mesh(config.mesh, config.num_replicas, some_devices(num_devices)))
    state = programs.init(jax.random.key(0)) if start is None else programs.from_params(start)
    params, inner_state, _ = state
    values = batch_of(config)
    batch = {name: jax.device_put(values[name], x.sharding) for name, x in programs.batch.items()}
    found = []
    for step in range(1, 7):
        params, inner_state, metrics = programs.inner_step(params, inner_state, batch, np.int32(step))
        found.append(jax.device_get(metrics))
    assert_copies_are_equal(params)
    return jax.tree.map(lambda *steps: np.stack(steps), *found)


def batch_of(config: TrainConfig) -> dict[str, np.ndarray]:
    """Return the replicas' batch of all steps, int32 arrays (N, B, T); documents have ten tokens."""
    data, rng = config.data, np.random.default_rng(0)
    shape = config.num_replicas, data.batch_size, data.sequence_length
    batch = {name: rng.integers(0, config.model.vocab_size, shape).astype(np.int32) for name in ("input_ids", "labels")}
    if data.document_mask:
        documents_T = 1 + np.arange(data.sequence_length, dtype=np.int32) // 10
        batch["segment_ids"] = np.broadcast_to(documents_T, shape)
    return batch


def assert_copies_are_equal(params: Any) -> None:
    """Assert that a parameter that several devices hold, such as a norm on each stage, is bitwise equal on all."""
    for path, x in jax.tree.leaves_with_path(params):
        first: dict[str, np.ndarray] = {}
        for shard in x.addressable_shards:
            copy = np.asarray(shard.data)
            np.testing.assert_array_equal(
                copy, first.setdefault(str(shard.index), copy), err_msg=jax.tree_util.keystr(path)
            )
