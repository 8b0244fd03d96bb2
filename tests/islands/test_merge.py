"""Merging the models of islands that have ended, from their folders; `test_several_processes` merges training ones."""

import dataclasses
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.config import TrainConfig, from_dict, save_config
from noloco_jax.errors import UserError
from noloco_jax.islands.command import main as island
from noloco_jax.islands.membership import write_incarnation
from noloco_jax.model.huggingface import config_from_folder, load_params
from noloco_jax.optim import prng
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import Programs, build_programs

NAMES = ("paris", "berlin", "rome")
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
    return build_programs(own, make_mesh(own.mesh, own.num_replicas, jax.devices()[:1]))


def saved(folder: Path, replica: int, config: TrainConfig = CONFIG, value: float | None = None) -> list[np.ndarray]:
    """Save a checkpoint as an island does; return its weights."""
    state = programs().init(prng.key(replica))
    if value is not None:
        state = state._replace(params=jax.tree.map(lambda x: x * value, state.params))
    folder.mkdir(parents=True)
    save_config(config, folder)
    write_incarnation(folder, 1)
    with Checkpointer(folder, config) as checkpoints:
        checkpoints.save(7, state, {0: {"replica": replica, "source": {}}}, sync_state={"round": replica})
    return [np.asarray(x[0]) for x in jax.tree.leaves(state.params)]


def assert_merged(folder: Path, *parts: list[np.ndarray]) -> None:
    """Check that a model is the mean of these weights."""
    config = from_dict({"model": config_from_folder(folder)}).model
    for mine, *theirs in zip(jax.tree.leaves(load_params(folder, config)), *parts, strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.mean(theirs, axis=0), atol=1e-6)


def merge(out: Path, *folders: Path, more: tuple[str, ...] = ()) -> int:
    return island(["merge", f"--out={out}", *more, "--workdirs", *map(str, folders)])


def test_the_merged_model_is_the_mean_of_the_folders_weights(tmp_path, capsys):
    parts = [saved(tmp_path / name, i) for i, name in enumerate(NAMES)]
    assert merge(tmp_path / "merged", *(tmp_path / name for name in NAMES)) == 0
    said = capsys.readouterr().out
    assert "berlin: weights after round 2" in said and "the mean of 3 of 3 islands, up to 2 rounds apart" in said
    assert_merged(tmp_path / "merged", *parts)


def test_weights_that_are_not_finite_are_left_out_and_named(tmp_path, capsys):
    saved(tmp_path / "paris", 0)
    saved(tmp_path / "berlin", 1, value=np.nan)
    assert merge(tmp_path / "merged", tmp_path / "paris", tmp_path / "berlin") == 0
    said = capsys.readouterr().out
    assert "berlin: its weights are not finite" in said and "without berlin" in said
    with pytest.raises(UserError, match="the weights of 1 islands can be had, not those of berlin, and --at_least=2"):
        merge(tmp_path / "two", tmp_path / "paris", tmp_path / "berlin", more=("--at_least=2",))
    assert not (tmp_path / "two").exists()


def test_weights_that_are_out_of_line_are_left_out_and_named(tmp_path, capsys):
    parts = [saved(tmp_path / name, i, value=1e6 if i == 1 else None) for i, name in enumerate(NAMES)]
    assert merge(tmp_path / "merged", *(tmp_path / name for name in NAMES)) == 0
    said = capsys.readouterr().out
    assert "norms away from the median of all" in said and "the mean of 2 of 3 islands" in said
    assert "without berlin" in said
    assert_merged(tmp_path / "merged", parts[0], parts[2])
    assert {path.name for path in tmp_path.iterdir()} == {*NAMES, "merged"}


def test_of_two_folders_that_disagree_the_user_says_which_is_right(tmp_path, capsys):
    parts = [saved(tmp_path / name, i, value=1e6 if i == 1 else None) for i, name in enumerate(NAMES[:2])]
    folders = [tmp_path / name for name in NAMES[:2]]
    with pytest.raises(UserError, match=r"which are wrong is not known; .* --without=paris or --without=berlin"):
        merge(tmp_path / "merged", *folders)
    assert merge(tmp_path / "merged", *folders, more=("--without=berlin",)) == 0
    assert "berlin: left out by --without" in capsys.readouterr().out
    assert_merged(tmp_path / "merged", parts[0])


def test_islands_left_out_by_name_are_a_list_or_repeated_and_must_be_known(tmp_path, capsys):
    parts = [saved(tmp_path / name, i) for i, name in enumerate(NAMES)]
    folders = [tmp_path / name for name in NAMES]
    for number, more in enumerate((("--without=paris,rome",), ("--without=paris", "--without=rome"))):
        assert merge(tmp_path / str(number), *folders, more=more) == 0
        assert "the mean of 1 of 3 islands, all after the same round, without paris, rome" in capsys.readouterr().out
        assert_merged(tmp_path / str(number), parts[1])
    with pytest.raises(UserError, match="--without=oslo: the islands are paris, berlin, rome"):
        merge(tmp_path / "merged", *folders, more=("--without=oslo",))


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
