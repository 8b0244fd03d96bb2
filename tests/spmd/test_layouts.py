"""Equal training on every layout: all replicas on one device, a device each, several per device, sharded.

A layout that needs more GPUs than there are runs on CPU devices and is compared with a run on one GPU.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
import pytest

from noloco_jax.config import DataConfig, InnerConfig, MeshConfig, ModelConfig, OuterConfig, TrainConfig
from noloco_jax.spmd.batches import place_batch
from noloco_jax.spmd.compile import compile_programs
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import build_programs
from support import tiny_model
from support.initial import initial_state

NUM_STEPS, SYNC_EVERY = 6, 2
VIRTUAL = MeshConfig(replica=1)
CONFIG = TrainConfig(
    num_replicas=8,
    num_steps=NUM_STEPS,
    model=ModelConfig(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=64),
    # Adam's eps bounds how much it amplifies a rounding error of a gradient near zero: lr / eps times.
    inner=InnerConfig(lr=1e-2, min_lr=1e-3, warmup_steps=1, eps=1e-4),
    outer=OuterConfig(sync_every=SYNC_EVERY),
    data=DataConfig(sequence_length=16, batch_size=2),
)


TINY = dataclasses.replace(CONFIG.model, kind=tiny_model.KIND)
LLAMA = dataclasses.replace(CONFIG.model, num_layers=1)  # its layers are unrolled, the tiny model's are scanned


class Run(NamedTuple):
    losses: np.ndarray  # (steps, N)
    grad_norms: np.ndarray  # (steps, N)
    params: list[dict]  # after every step and the outer step that may follow it
    perplexities: np.ndarray  # summed loss and labels of every replica, (2, N)


def batches() -> Iterator[dict[str, np.ndarray]]:
    """Yield different sequences for every replica and step."""
    data, rng = CONFIG.data, np.random.default_rng(0)
    while True:
        shape = (CONFIG.num_replicas, data.batch_size, data.sequence_length + 1)
        tokens = rng.integers(0, CONFIG.model.vocab_size, shape, dtype=np.int32)
        yield {"input_ids": tokens[..., :-1], "labels": tokens[..., 1:]}


def train(model: ModelConfig, method: str, outer: OuterConfig, mesh: MeshConfig) -> Run:
    config = dataclasses.replace(CONFIG, model=model, method=method, outer=outer, mesh=mesh)
    sizes = [size for size in dataclasses.asdict(mesh).values() if isinstance(size, int)]
    num_devices = int(np.prod(sizes))
    devices = jax.devices() if len(jax.devices()) >= num_devices else jax.devices("cpu")
    with jax.default_device(devices[0]):
        return _train_on(devices[:num_devices], config)


def _train_on(devices: list, config: TrainConfig) -> Run:
    schedule = config.schedule
    with jax.numpy_rank_promotion("allow"):
        programs = build_programs(config, make_mesh(config.mesh, config.num_replicas, devices))
        programs = compile_programs(programs, only=["inner_step", "evaluate", "outer_step", "correct_step"])

    # The compiled program of the layout, against single operations.
    start = initial_state(programs) if config.mesh == VIRTUAL else programs.init(jax.random.key(0))
    params, inner, outer_state = start
    losses, grad_norms, history = [], [], []
    stream = batches()
    for step in range(1, NUM_STEPS + 1):
        batch = place_batch(dict(enumerate(_rows(next(stream)))), programs.batch)
        params, inner, metrics = programs.inner_step(params, inner, batch, np.int32(step))
        for _ in range(schedule.due(step) if schedule else 0):
            assert programs.outer_step is not None
            params, outer_state = programs.outer_step(params, outer_state)
        if programs.correct_step is not None and step % SYNC_EVERY == 1 and step > 1:
            params, outer_state = programs.correct_step(params, outer_state)
        losses.append(metrics.loss)
        grad_norms.append(metrics.grad_norm)
        history.append(jax.tree.map(np.array, params))
    held_out = place_batch(dict(enumerate(_rows(next(stream)))), programs.batch)
    evaluation = jax.device_get(programs.evaluate(params, held_out))
    return Run(np.stack(losses), np.stack(grad_norms), history, np.stack(evaluation))


def _rows(batch: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    return [{name: x[i] for name, x in batch.items()} for i in range(CONFIG.num_replicas)]


WHOLE = CONFIG.outer
LATE_FRAGMENTS = OuterConfig(sync_every=SYNC_EVERY, fragments=4, delay=1)
CUBE = MeshConfig(replica=2, fsdp=2, tensor=2)
# `train/test_parts_and_modes` has the outer steps of every method and layout.
LAYOUTS = {
    "llama-cube": ((LLAMA, "noloco", WHOLE), CUBE),
    "ddp-fsdp": ((TINY, "ddp", WHOLE), MeshConfig(replica=4, fsdp=2)),
    "late-fragments-cube": ((TINY, "noloco", LATE_FRAGMENTS), CUBE),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_agrees_with_virtual_replicas_step_by_step(layout):
    run, mesh = LAYOUTS[layout]
    expected, actual = train(*run, VIRTUAL), train(*run, mesh)
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=2e-6)
    np.testing.assert_allclose(actual.grad_norms, expected.grad_norms, rtol=1e-5)
    for mine, theirs in zip(actual.params, expected.params, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6), mine, theirs)
    np.testing.assert_allclose(actual.perplexities, expected.perplexities, rtol=1e-6)
