"""Restoring a checkpoint with another number of pipeline stages."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from noloco_jax.checkpoint import elastic
from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.config import DataConfig, InnerConfig, MeshConfig, ModelConfig, OuterConfig, TrainConfig
from noloco_jax.spmd.programs import Programs, TrainState
from noloco_jax.spmd.stages import resize_vocabulary
from support import tiny_model
from support.checkpoints import positions, programs_of, random_state, saved
from support.initial import initial_state

N, B, T = 2, 2, 8
SAVED, LAST = 2, 4
CONFIG = TrainConfig(
    num_replicas=N,
    num_steps=LAST,
    num_microbatches=2,
    model=ModelConfig(kind=tiny_model.KIND, hidden_size=16, intermediate_size=32, num_layers=4),
    inner=InnerConfig(lr=1e-2, warmup_steps=0, eps=1e-3),
    outer=OuterConfig(sync_every=2),
    data=DataConfig(sequence_length=T, batch_size=B),
)


def config_of(num_stages: int, vocab_size: int) -> TrainConfig:
    """Return a config with fixed routing, under which any number of stages is the same model."""
    model = dataclasses.replace(CONFIG.model, vocab_size=vocab_size)
    mesh = MeshConfig(replica=N, stage=num_stages, routing="fixed")
    return dataclasses.replace(CONFIG, model=model, mesh=mesh)


def train(programs: Programs, state: TrainState, first: int, last: int) -> tuple[TrainState, np.ndarray]:
    """Return the state after steps `first` to `last`, with an outer step after every second one, and the losses."""
    assert programs.outer_step is not None
    params, inner, outer = state
    losses = []
    for step in range(first, last + 1):
        tokens_NBT = np.random.default_rng(step).integers(0, 29, (N, B, T + 1), dtype=np.int32)
        batch = {"input_ids": tokens_NBT[..., :-1], "labels": tokens_NBT[..., 1:]}
        batch = {name: jax.device_put(x, programs.batch[name].sharding) for name, x in batch.items()}
        params, inner, metrics = programs.inner_step(params, inner, batch, np.int32(step))
        if step % 2 == 0:
            params, outer = programs.outer_step(params, outer)
        losses.append(np.asarray(metrics.loss))
    return TrainState(params, inner, outer), np.stack(losses)


def unpadded(state: TrainState, vocab_size: int) -> Any:
    """Return weights, moments and slow weights without vocabulary padding, on the host."""
    return jax.tree.map(np.asarray, resize_vocabulary(CONFIG.model, state, vocab_size))


@pytest.mark.parametrize(
    ("before", "after", "vocab_size", "words"),
    [
        (2, 1, 64, ""),
        (4, 2, 136, "the vocabulary is padded to 144 tokens, before 160"),
        (1, 4, 29, "the vocabulary is padded to 128 tokens, before 29"),
    ],
)
def test_restoring_with_other_stages_preserves_the_state(tmp_path, before, after, vocab_size, words):
    kept = saved(tmp_path, config_of(before, vocab_size))
    config = config_of(after, vocab_size)
    programs = programs_of(config)
    with Checkpointer(tmp_path, config) as checkpoints:
        state, changed = elastic.restore(checkpoints.open(3), config.model, programs, config.elastic)
    jax.tree.map(lambda x, like: x.sharding == like.sharding or pytest.fail("sharding"), state, programs.state)
    jax.tree.map(np.testing.assert_array_equal, unpadded(state, vocab_size), unpadded(kept, vocab_size))
    assert changed == words


def test_training_goes_on_alike_with_other_stages(tmp_path):
    vocab_size = 136
    programs = programs_of(config_of(4, vocab_size))
    state, _ = train(programs, initial_state(programs), 1, SAVED)
    with Checkpointer(tmp_path, config_of(4, vocab_size)) as checkpoints:
        checkpoints.save(SAVED, state, positions(N))
    end, losses = train(programs, state, SAVED + 1, LAST)

    config = config_of(2, vocab_size)
    with Checkpointer(tmp_path, config) as checkpoints:
        state, _ = elastic.restore(checkpoints.open(SAVED), config.model, programs_of(config), config.elastic)
    mine, my_losses = train(programs_of(config), state, SAVED + 1, LAST)
    np.testing.assert_allclose(my_losses, losses, rtol=1e-5)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5),
        unpadded(mine, vocab_size),
        unpadded(end, vocab_size),
    )


def test_restoring_with_other_stages_keeps_the_windows_of_a_modulo_format(tmp_path):
    def windowed(num_stages: int) -> TrainConfig:
        config = config_of(num_stages, 130)
        return dataclasses.replace(config, outer=dataclasses.replace(config.outer, wire="modulo4"))

    state, rng = random_state(programs_of(windowed(1)).state), np.random.default_rng(0)
    assert state.outer is not None
    windows: Any = jax.tree.map(lambda x: rng.integers(1, 200, x.shape).astype(x.dtype), state.outer.windows)
    with Checkpointer(tmp_path, windowed(1)) as checkpoints:
        checkpoints.save(SAVED, state._replace(outer=state.outer._replace(windows=windows)), positions(N))
    config = windowed(2)
    with Checkpointer(tmp_path, config) as checkpoints:
        state, changed = elastic.restore(checkpoints.open(SAVED), config.model, programs_of(config), config.elastic)
    assert changed == "the vocabulary is padded to 144 tokens, before 130"
    assert state.outer is not None
    differ = set()
    for path, mine in jax.tree.leaves_with_path(state.outer.windows):
        theirs = functools.reduce(lambda tree, key: tree[key.key], path, windows)
        kept = tuple(map(slice, theirs.shape))
        np.testing.assert_array_equal(mine[kept], theirs)
        assert np.count_nonzero(mine) == np.count_nonzero(theirs)
        differ |= {path[0].key} if mine.shape != theirs.shape else set()
    assert differ == {"embed", "head"}
