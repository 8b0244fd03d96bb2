"""Checkpoints: saving a state and restoring it on any mesh and with any number of replicas."""

import asyncio
import dataclasses
import errno
import gc
import json
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

from noloco_jax.checkpoint import elastic
from noloco_jax.checkpoint.quiet import quiet_saves
from noloco_jax.checkpoint.record import Totals
from noloco_jax.checkpoint.saved import SavedShape
from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.cluster.processes import OneProcess
from noloco_jax.config import ModelConfig, OuterConfig, TrainConfig
from noloco_jax.errors import TransientError, UserError
from noloco_jax.spmd.offload import offloaded
from noloco_jax.spmd.programs import TrainState
from noloco_jax.spmd.stages import resize_vocabulary
from support.checkpoints import CONFIG, position, positions, programs_of, random_state, saved


def changed(num_replicas: int = 4, elastic: str = "", **mesh: int) -> TrainConfig:
    sizes = dataclasses.replace(CONFIG.mesh, **mesh)
    return dataclasses.replace(CONFIG, num_replicas=num_replicas, elastic=elastic, mesh=sizes)


def in_windows(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, outer=dataclasses.replace(config.outer, wire="modulo4"))


def with_muon(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, inner=dataclasses.replace(config.inner, optimizer="muon"))


def test_saving_does_not_query_jax_for_preemption(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", asked.append)
    saved(tmp_path, CONFIG)
    assert asked == []


def restored(workdir: Path, config: TrainConfig) -> tuple[TrainState, list[dict], str]:
    programs = programs_of(config)
    with Checkpointer(workdir, config) as checkpoints:
        newest = checkpoints.newest()
        assert newest is not None and newest.step == 3
        state, changed = elastic.restore(newest, config.model, programs, config.elastic)
        data = elastic.data_positions(newest, config.num_replicas)
    jax.tree.map(lambda x, like: x.sharding == like.sharding or pytest.fail("sharding"), state, programs.state)
    return state, data, changed


def assert_equal(state: TrainState, expected: TrainState) -> None:
    jax.tree.map(np.testing.assert_array_equal, state, expected)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (changed(), changed(replica=4)),
        (changed(replica=4, fsdp=2), changed(replica=2)),
        (with_muon(changed(replica=2, tensor=2)), with_muon(changed(replica=1, fsdp=2))),
    ],
    ids=["virtual-mesh", "sharded-slots", "muon"],
)
def test_a_state_is_restored_on_another_mesh(tmp_path, before, after):
    state = saved(tmp_path, before)
    back, data, changed = restored(tmp_path, after)
    assert_equal(back, state)
    assert data == [position(replica, 4) for replica in range(4)]
    assert changed == ""


def test_arrays_may_be_donated_while_they_are_saved(tmp_path):
    large = ModelConfig(hidden_size=256, intermediate_size=512, num_layers=2, vocab_size=32)
    config = dataclasses.replace(CONFIG, model=large)
    state = random_state(programs_of(config).state)
    expected = jax.tree.map(np.array, state)
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    with Checkpointer(tmp_path, config) as checkpoints:
        checkpoints.save(3, state, positions(4))
        for _ in range(5):
            state = overwrite(state)
        jax.block_until_ready(state)
    assert_equal(restored(tmp_path, config)[0], expected)


def members(before: int, after: int, replica: int, choice: str) -> list[int]:
    """Return the former replicas whose mean a replica is."""
    return [replica % before] if choice == "copy" else list(range(replica, before, after))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (changed(4), changed(3, "merge", replica=3)),
        (changed(2, replica=2), changed(4, "copy", replica=2, fsdp=2)),
        (with_muon(changed(4, replica=2, fsdp=2)), with_muon(changed(2, "merge", replica=2))),
        (in_windows(changed(4, replica=2, fsdp=2)), in_windows(changed(2, "merge"))),
    ],
    ids=["merge-uneven", "copy", "merge-muon", "merge-modulo"],
)
def test_restoring_another_number_of_replicas_follows_the_elastic_setting(tmp_path, before, after):
    state = saved(tmp_path, before)
    back, data, changed = restored(tmp_path, after)
    n, m = before.num_replicas, after.num_replicas

    def expected(x: jax.Array) -> np.ndarray:
        rows = np.asarray(x)
        if rows.ndim == 0:
            return rows
        return np.stack([rows[members(n, m, j, after.elastic)].mean(axis=0, dtype=np.float64) for j in range(m)])

    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, expected(y), rtol=1e-6, atol=5e-7), back, state)
    assert [(entry["replica"], entry["num_replicas"]) for entry in data] == [(j, m) for j in range(m)]
    assert f"elastic='{after.elastic}': {n} replicas become {m}" in changed


def test_a_whole_checkpoint_that_does_not_fit_is_never_advised_to_be_deleted(tmp_path, monkeypatch):
    saved(tmp_path, changed(4))
    error = ValueError("Requested shape: (4, 68, 1) is not compatible with the stored shape: (4, 65, 1)")
    with Checkpointer(tmp_path, changed(4)) as checkpoints:
        found = checkpoints.open(3)
        monkeypatch.setattr(checkpoints._manager, "restore", raising(error))
        with pytest.raises(UserError, match="is whole, and cannot be restored for this configuration") as raised:
            found.state(programs_of(changed(4)).between_steps)
    assert "delete" not in str(raised.value)


def test_elastic_restore_returns_corrections_and_offloaded_outer_state_to_host_memory(tmp_path):
    outer = OuterConfig(sync_every=4, fragments=2, delay=1, offload=True)
    before, after = (dataclasses.replace(config, outer=outer) for config in (changed(2), changed(4, "copy", replica=2)))
    state = saved(tmp_path, before)
    programs = offloaded(programs_of(after))
    with Checkpointer(tmp_path, after) as checkpoints:
        back, _ = elastic.restore(checkpoints.open(3), after.model, programs, after.elastic)
    assert_equal(back, jax.tree.map(lambda x: np.asarray(x)[[0, 1, 0, 1]] if x.ndim else x, state))
    # The outer state has slow weights, momentum and the pending corrections (Late).
    assert len(jax.tree.leaves(back.outer)) > 3 * len(jax.tree.leaves(back.params))
    assert {x.sharding for x in jax.tree.leaves(back)} == {x.sharding for x in jax.tree.leaves(programs.between_steps)}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(back.outer)} == {"pinned_host"}


def test_restore_each_frees_an_array_before_reading_the_next(tmp_path):
    like = programs_of(CONFIG).state
    saved(tmp_path, CONFIG)
    read: list[weakref.ref] = []

    def to_nothing(x: jax.Array) -> jax.Array:
        assert not any(earlier() is not None for earlier in read)
        read.append(weakref.ref(x))
        return x.sum()

    with Checkpointer(tmp_path, CONFIG) as checkpoints:
        checkpoints.open(3).each(like, jax.tree.map(lambda _: to_nothing, like))
    assert len(read) == len(jax.tree.leaves(like))


@pytest.mark.parametrize(("before", "after"), [(5, 2), (8, 3), (6, 2), (3, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_replicas_are_merged_into_themselves(before, after, dtype):
    one = jax.random.normal(jax.random.key(0), (64, 64)).astype(dtype)
    merged = elastic._convert_rows(jnp.stack([one] * before), before, after)
    assert merged.dtype == one.dtype
    np.testing.assert_array_equal(merged, jnp.stack([one] * after))


@pytest.mark.parametrize("choice", ["", "merge", "copy"])
def test_another_number_of_replicas_requires_a_matching_elastic_setting(choice):
    saved_shape = SavedShape(4, CONFIG.model.vocab_size)
    fitting = {4: ("", "merge", "copy"), 2: ("merge",), 8: ("copy",)}
    for num_replicas, choices in fitting.items():
        message = f"num_replicas=4, the config has {num_replicas} and elastic={choice!r}: give --"
        with nullcontext() if choice in choices else pytest.raises(UserError, match=message):
            elastic.check_elastic(choice, num_replicas, saved_shape)


def test_from_step_goes_back_from_a_damaged_checkpoint_and_sets_it_aside(tmp_path):
    save_steps(tmp_path, 2, 3)
    (tmp_path / "checkpoints/3/digests.txt").write_bytes(b"torn")
    with pytest.raises(UserError, match="give --from_step=2"):
        start_step(tmp_path, None)
    assert start_step(tmp_path, 2) == 2
    with Checkpointer(tmp_path, CONFIG, from_step=2) as checkpoints:
        assert checkpoints.set_aside_after(2) == 1
    assert (tmp_path / "checkpoints_set_aside/3/digests.txt").read_bytes() == b"torn"


def test_a_record_is_read_once_however_often_it_is_used(tmp_path, monkeypatch):
    save_steps(tmp_path, 3)
    with Checkpointer(tmp_path, CONFIG) as checkpoints:
        restore, read = checkpoints._manager.restore, []

        def counted(step: int, args: Any) -> Any:
            read.append(args)
            return restore(step, args=args)

        monkeypatch.setattr(checkpoints._manager, "restore", counted)
        for _ in range(3):
            found = checkpoints.start()
            assert found is not None and found is checkpoints.open(3) and found.totals == Totals()
    assert len(read) == 2  # the run's record and the data positions


@pytest.mark.parametrize(("keep", "period", "kept"), [(2, 0, ["4", "5"]), (1, 2, ["2", "4", "5"])])
def test_the_newest_checkpoints_and_those_of_the_period_stay(tmp_path, keep, period, kept):
    config = dataclasses.replace(CONFIG, keep_checkpoints=keep, keep_period=period)
    save_steps(tmp_path, 1, 2, 3, 4, 5, config=config)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == kept


def save_steps(workdir: Path, *steps: int, from_step: Any = None, config: Any = CONFIG, totals: Any = None) -> None:
    """Save tiny checkpoints whose contents do not matter."""
    state = TrainState({"embed": np.zeros((4, 32, 1))}, {}, None)
    with Checkpointer(workdir, config, from_step=from_step) as checkpoints:
        for step in steps:
            checkpoints.save(step, state, positions(4), totals)


def start_step(workdir: Path, from_step: int | None, config: TrainConfig = CONFIG) -> int | None:
    with Checkpointer(workdir, config, from_step=from_step, read_only=True) as checkpoints:
        found = checkpoints.start()
        return found and found.step


def test_from_step_sets_later_checkpoints_aside_without_deleting_them(tmp_path):
    save_steps(tmp_path, 4, 8)
    assert (start_step(tmp_path, None), start_step(tmp_path, 4)) == (8, 4)
    for names in (["8"], ["8", "8.1"]):
        with Checkpointer(tmp_path, CONFIG, from_step=4) as checkpoints:
            assert checkpoints.set_aside_after(4) == 1
            newest = checkpoints.newest()
            assert newest is not None and newest.step == 4
        assert sorted(path.name for path in (tmp_path / "checkpoints_set_aside").iterdir()) == names
        save_steps(tmp_path, 8)


def test_repeating_from_step_resumes_from_the_checkpoint_saved_since(tmp_path):
    save_steps(tmp_path, 4, 6, from_step=4)
    assert (start_step(tmp_path, 4), start_step(tmp_path, None)) == (6, 6)
    save_steps(tmp_path, 7)  # by a run without --from_step
    with pytest.raises(UserError, match=r"--from_step=5: .* no checkpoint of that step \(there are 6, 7\)"):
        start_step(tmp_path, 5)


def test_a_checkpoint_records_the_config_totals_data_source_and_versions_of_its_run(tmp_path):
    totals = Totals(tokens=4000, bytes_sent_total=1891942.4, seconds=1.5, seconds_waiting_for_data=0.25)
    save_steps(tmp_path, 3, totals=totals)
    with Checkpointer(tmp_path, dataclasses.replace(CONFIG, num_steps=7), read_only=True) as checkpoints:
        found = checkpoints.open(3)
        assert (found.config, found.totals) == (CONFIG, totals)
        assert [str(change) for change in found.changes] == ["num_steps: 1000 before, 7 now"]
        assert found.version_changes == []
    record = json.loads((tmp_path / "checkpoints/3/run/metadata").read_text())
    assert record["source"] == {"files": 4}
    assert record["versions"]["jax"] == jax.__version__


def test_processes_that_see_different_checkpoints_do_not_start(tmp_path, monkeypatch):
    saved(tmp_path, CONFIG)
    processes = OneProcess()
    monkeypatch.setattr(processes, "gather", lambda step: [step, 2])
    with (
        Checkpointer(tmp_path, CONFIG, processes) as checkpoints,
        pytest.raises(TransientError, match=r"\(steps 2, 3\)"),
    ):
        checkpoints.newest()


LOST = ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer [127.0.0.1]:43187")
FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    ValueError("RESOURCE_EXHAUSTED:\n No space left on device [28]"),
]


def raising(error: Exception) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ESTALE, "stale file handle"), LOST])
def test_memory_storage_and_peer_errors_are_not_reported_as_checkpoint_damage(tmp_path, monkeypatch, error):
    saved(tmp_path, CONFIG)
    with Checkpointer(tmp_path, CONFIG) as checkpoints:
        found = checkpoints.open(3)
        monkeypatch.setattr(checkpoints._manager, "restore", raising(error))
        with pytest.raises(type(error)) as raised:
            found.state(programs_of(CONFIG).state)
    assert raised.value is error


@pytest.mark.parametrize("error", FULL)
@pytest.mark.parametrize("method", ["save", "wait_until_finished"])
def test_a_full_disk_during_a_save_is_a_transient_error(tmp_path, monkeypatch, method, error):
    """The save raises the error or, for the last save, the wait for its end."""
    checkpoints = Checkpointer(tmp_path, CONFIG)
    message = r"^[^\n]*not be saved \(.*/checkpoints: no space left on device\): make room[^\n]*$"
    with monkeypatch.context() as patches, pytest.raises(TransientError, match=message):
        patches.setattr(checkpoints._manager, method, raising(error))
        checkpoints.save(3, random_state(programs_of(CONFIG).state), positions(4))
        checkpoints.close()
    checkpoints.close()


def test_a_lost_process_during_a_save_is_not_reported_as_a_full_disk(tmp_path, monkeypatch):
    with Checkpointer(tmp_path, CONFIG) as checkpoints:
        monkeypatch.setattr(checkpoints._manager, "save", raising(LOST))
        with pytest.raises(ValueError, match="Gloo"):
            checkpoints.save(3, random_state(programs_of(CONFIG).state), positions(4))


def test_restore_params_removes_the_vocabulary_padding_of_stages(tmp_path):
    state = random_state(programs_of(CONFIG).state)
    with Checkpointer(tmp_path, CONFIG) as checkpoints:
        padded = resize_vocabulary(CONFIG.model, state.params, CONFIG.model.vocab_size + 3)
        checkpoints.save(3, state._replace(params=padded), positions(4))
    with Checkpointer(tmp_path, CONFIG, read_only=True) as checkpoints:
        params = checkpoints.open(3).params()
    assert all(type(x) is np.ndarray for x in jax.tree.leaves(params))
    jax.tree.map(np.testing.assert_array_equal, params, state.params)


@pytest.mark.parametrize(("module", "is_logged"), [("orbax.checkpoint.serialization", False), ("noloco_jax", True)])
def test_further_failed_writes_of_a_save_are_not_logged_but_all_other_errors_are(module, is_logged, caplog):
    written: dict[str, Any] = {"__name__": module}
    exec("async def write(): raise ValueError('no space left')", written)

    async def save() -> None:
        writes = [asyncio.create_task(written["write"]()) for _ in range(3)]
        await asyncio.wait(writes)
        writes[0].result()

    quiet_saves()
    with pytest.raises(ValueError):
        asyncio.run(save())
    gc.collect()  # asyncio logs an unretrieved exception when its task is collected
    assert bool(caplog.records) is is_logged
