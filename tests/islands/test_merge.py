"""Merging the models of islands that have ended, from their folders; `test_several_processes` merges training ones."""

import dataclasses
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from noloco_jax import draws
from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.config import TrainConfig, from_dict, save_config
from noloco_jax.errors import UserError
from noloco_jax.island.command import main as island
from noloco_jax.islands.membership import write_incarnation
from noloco_jax.model.huggingface import config_from_folder, load_params
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, build_programs

CONFIG = from_dict(
    {
        "num_replicas": 3,
        "model": {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1},
        "data": {"sequence_length": 8, "batch_size": 2},
    }
)


@cache
def programs() -> Programs:
    own = dataclasses.replace(CONFIG, num_replicas=1)
    return build_programs(own, make_mesh(own, jax.devices()[:1]))


def saved(folder: Path, replica: int, config: TrainConfig = CONFIG, value: float | None = None) -> list[np.ndarray]:
    """Save a checkpoint as an island does; return its weights."""
    state = programs().init(draws.key(replica))
    if value is not None:
        state = state._replace(params=jax.tree.map(lambda x: x * value, state.params))
    folder.mkdir(parents=True)
    save_config(config, folder)
    write_incarnation(folder, 1)
    with Checkpointer(folder, config) as checkpoints:
        checkpoints.save(7, state, {0: {"replica": replica, "source": {}}}, sync_state={"round": replica})
    return [np.asarray(x[0]) for x in jax.tree.leaves(state.params)]


def merge(out: Path, *folders: Path, more: tuple[str, ...] = ()) -> int:
    return island(["merge", f"--out={out}", *more, "--workdirs", *map(str, folders)])


def test_the_merged_model_is_the_mean_of_the_folders_weights(tmp_path, capsys):
    parts = [saved(tmp_path / name, i) for i, name in enumerate(("paris", "berlin", "rome"))]
    assert merge(tmp_path / "merged", *(tmp_path / name for name in ("paris", "berlin", "rome"))) == 0
    said = capsys.readouterr().out
    assert "berlin: weights after round 2" in said and "the mean of 3 of 3 islands, up to 2 rounds apart" in said
    config = from_dict({"model": config_from_folder(tmp_path / "merged")}).model
    found = jax.tree.leaves(load_params(tmp_path / "merged", config))
    for mine, *theirs in zip(found, *parts, strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.mean(theirs, axis=0), atol=1e-6)


def test_weights_that_are_not_finite_are_left_out_and_named(tmp_path, capsys):
    saved(tmp_path / "paris", 0)
    saved(tmp_path / "berlin", 1, value=np.nan)
    assert merge(tmp_path / "merged", tmp_path / "paris", tmp_path / "berlin") == 0
    said = capsys.readouterr().out
    assert "berlin: its checkpoint's weights are not finite" in said and "without berlin" in said
    with pytest.raises(UserError, match="the weights of 1 islands can be had, not those of berlin, and --at_least=2"):
        merge(tmp_path / "two", tmp_path / "paris", tmp_path / "berlin", more=("--at_least=2",))
    assert not (tmp_path / "two").exists()


def test_folders_that_are_not_of_one_run_s_islands_are_refused(tmp_path):
    saved(tmp_path / "paris", 0)
    saved(tmp_path / "again", 0)
    saved(tmp_path / "other", 1, dataclasses.replace(CONFIG, seed=9))
    (tmp_path / "empty").mkdir()
    for folder, said in (
        ("again", "are both of replica 0: give each island's folder once"),
        ("other", "islands of two runs cannot be merged"),
        ("empty", "is no folder of an island"),
    ):
        with pytest.raises(UserError, match=said):
            merge(tmp_path / "merged", tmp_path / "paris", tmp_path / folder)
    assert not (tmp_path / "merged").exists()
