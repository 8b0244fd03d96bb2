"""Islands in a user's own loop: `nj.Island`."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import noloco_jax as nj
from noloco_jax.errors import UserError
from noloco_jax.islands.island import identity_of
from noloco_jax.islands.own_state import OwnState
from noloco_jax.islands.peers import difference
from noloco_jax.islands.roster import Roster
from support import processes, warm
from support.at_once import side_by_side, wait_for_exchanges
from support.paths import ROOT
from support.rosters import on_loopback, written
from support.training_islands import begin_without

NAMES = ("paris", "berlin")
SHAPES = {"w": (64, 96), "b": (96,)}
STEPS = 12
FRESH = {"steps": False, "tokens": False, "name": False, "adam": (True, False)}


@pytest.fixture
def roster() -> Roster:
    return on_loopback(*NAMES, run="own")


def island_of(roster: Roster, name: str, folder: Path, outer: Any = None) -> nj.Island:
    outer = outer or nj.noloco(sync_every=2)
    return nj.Island(roster, name, workdir=folder / name, outer=outer, report=lambda line: None)


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: 0.1 * rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def moved(params: Any, name: str, step: int) -> Any:
    """Return the weights after an inner step whose update depends on the island and the step."""
    rng = np.random.default_rng([NAMES.index(name), step])
    return {key: params[key] + 1e-3 * rng.normal(size=SHAPES[key]).astype(np.float32) for key in SHAPES}


def trained(
    roster: Roster, folder: Path, outer: Callable[[], Any]
) -> dict[str, tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Return each island's weights after the last step, and the merged ones; outer steps wait for their exchange."""
    results: dict[str, Any] = {}
    begun = threading.Barrier(len(NAMES), timeout=300)

    def train(name: str) -> None:
        with island_of(roster, name, folder, outer()) as island:
            params, _, step = island.begin(weights())
            begun.wait()  # otherwise an island that has ended a round would be the other's donor
            wait_for_exchanges(island._sync._steps)
            while step < STEPS:
                params, _, step = island.step(moved(params, name, step))
            results[name] = params, island.merge(params)

    side_by_side(*(lambda name=name: train(name) for name in NAMES))
    return results


def in_one_program(outer: Callable[..., Any]) -> dict[str, np.ndarray]:
    """Return the weights of both replicas of an Optax loop with the same steps."""
    tx = outer(nj.RandomPairing(len(NAMES)))
    update = jax.jit(jax.vmap(tx.update, axis_name="replica"))
    params = {key: np.stack([x] * len(NAMES)) for key, x in weights().items()}
    state = jax.vmap(tx.init)(params)
    for step in range(STEPS):
        each = [moved({key: x[i] for key, x in params.items()}, name, step) for i, name in enumerate(NAMES)]
        updates = {key: np.stack([one[key] for one in each]) - x for key, x in params.items()}
        updates, state = update(updates, state, params)
        params = jax.tree.map(np.asarray, optax.apply_updates(params, updates))
    return params


def test_islands_in_a_users_loop_match_an_optax_loop_and_merge_into_the_mean(roster, tmp_path):
    """`train/test_parts_and_modes` compares islands of whole messages with an own loop."""

    def outer(*pairing: Any) -> Any:
        return nj.noloco(*pairing, sync_every=5, fragments=2, wire="modulo4")

    found, expected = trained(roster, tmp_path, outer), in_one_program(outer)
    for number, name in enumerate(NAMES):
        for key, x in found[name][0].items():
            assert np.mean(np.abs(x - expected[key][number]) > 1e-6) < 1e-3, (name, key)
    for key in SHAPES:
        last = [found[name][0][key] for name in NAMES]
        assert np.abs(last[0] - last[1]).max() > 1e-4
        for name in NAMES:
            np.testing.assert_allclose(found[name][1][key], np.mean(last, axis=0), atol=1e-6)


def test_a_late_island_continues_from_the_weights_and_the_step_of_its_peers(tmp_path, monkeypatch):
    begin_without(monkeypatch, "rome")
    names = (*NAMES, "rome")
    roster = on_loopback(*names, run="own")
    is_over, late = threading.Event(), threading.Event()
    found: dict[str, Any] = {}
    tx = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda step: 1e-3 / (1 + step)))

    def first(name: str) -> Any:
        return {"steps": 0, "tokens": 2**40 + 1, "name": np.array([names.index(name)]), "adam": tx.init(weights())}

    def train(name: str) -> None:
        with island_of(roster, name, tmp_path) as island:
            params, rest, step = island.begin(weights(), first(name), fresh=FRESH)
            while not is_over.is_set():
                adam = tx.update(weights(), rest["adam"])[1]
                params = moved(params, "paris", step)
                rest = {**rest, "adam": adam, "steps": rest["steps"] + 1}
                params, rest, step = island.step(params, rest)
                assert rest["steps"] == step
                if step > 20:
                    late.set()
                is_over.wait(0.02)

    def join_late() -> None:
        assert late.wait(300)
        with island_of(roster, "rome", tmp_path) as it:
            params, rest, step = it.begin(weights(), first("rome"), fresh=FRESH)
            found.update(params=params, rest=rest, step=step)
        is_over.set()

    side_by_side(*(lambda name=name: train(name) for name in NAMES), join_late)
    assert found["step"] > 15 and found["rest"]["steps"] == found["step"]
    assert found["rest"]["name"].item() in (0, 1) and found["rest"]["tokens"] == 2**40 + 1
    moments, schedule = found["rest"]["adam"]
    assert int(schedule.count) == found["step"] and int(moments.count) == 0
    assert not any(np.any(x) for x in jax.tree.leaves((moments.mu, moments.nu)))
    assert not np.array_equal(found["params"]["w"], weights()["w"])


@pytest.mark.parametrize(
    ("outer", "line"),
    [
        (lambda: nj.diloco(), "islands exchange in pairs: give outer=noloco_jax.noloco"),
        (lambda: optax.adam(1e-3), "islands exchange in pairs: give outer=noloco_jax.noloco"),
        (lambda: nj.noloco(sync_every=4, delay=2), "delay=2 is not for islands"),
        (lambda: nj.noloco(nj.RandomPairing(4)), "the pairing is of 4 replicas in groups of 2, and the roster has 2"),
    ],
)
def test_an_outer_optimizer_unsupported_by_islands_is_refused_with_the_reason(outer, line, roster, tmp_path):
    with pytest.raises(ValueError, match=re.escape(line)):
        nj.Island(roster, "paris", workdir=tmp_path, outer=outer())


def test_a_second_begin_is_refused_and_weights_that_are_not_finite_are_not_saved(roster, tmp_path):
    def train(name: str) -> None:
        with island_of(roster, name, tmp_path) as island:
            params, _, _ = island.begin(weights())
            with pytest.raises(ValueError, match="the island has begun already: call begin once, before the first"):
                island.begin(weights())
            with pytest.raises(UserError, match="after step 0 have values that are not finite, and are not saved"):
                island.save({**params, "b": np.full(96, np.nan, np.float32)})
            assert not list((tmp_path / name / "checkpoints").iterdir())

    side_by_side(*(lambda name=name: train(name) for name in NAMES))


def test_an_island_saves_after_a_merge_in_which_a_correction_arrived_and_resumes_from_that(roster, tmp_path):
    """Regression test: the outer state from before the merge had been donated."""
    saved: dict[str, Any] = {}

    def train(name: str) -> None:
        with island_of(roster, name, tmp_path) as island:
            params, _, step = island.begin(weights())
            both.wait()
            island._sync._steps.apply_arrived = lambda state, step: (state, step)  # type: ignore[method-assign]
            for step in range(2):  # the exchange after the second is left for the merge
                params, _, _ = island.step(moved(params, name, step))
            assert island._link is not None
            merged = island.merge(params)
            assert island._link.status().committed == 1
            with saving:  # Orbax mixes up concurrent saves in one process
                saved[name] = island.save(merged)[0]
                assert island._checkpoints is not None
                island._checkpoints.close()
            np.testing.assert_array_equal(saved[name]["w"], merged["w"])
            both.wait()
        with island_of(roster, name, tmp_path) as island:
            params, _, step = island.begin(weights())
            assert step == 2
            np.testing.assert_array_equal(params["w"], saved[name]["w"])
            both.wait()

    both, saving = threading.Barrier(2, timeout=300), threading.Lock()
    side_by_side(*(lambda name=name: train(name) for name in NAMES))


def test_islands_that_begin_with_different_weights_refuse_each_other(roster, tmp_path):
    def start(name: str) -> None:
        with (
            island_of(roster, name, tmp_path) as island,
            pytest.raises(UserError, match=r"first weights: norm \S+ and"),
        ):
            island.begin({key: x + NAMES.index(name) for key, x in weights().items()})

    side_by_side(*(lambda name=name: start(name) for name in NAMES))


def test_a_common_value_that_differs_is_named(roster):
    own = OwnState(nj.noloco(), weights(), (), None)
    ours, theirs = (identity_of(roster, nj.noloco(), nj.RandomPairing(2), {"lr": x}, own, "") for x in (0.2, 0.1))
    assert difference(ours, theirs, "rome") == "common.lr: 0.2 here, 0.1 at rome"


def test_islands_with_different_arrays_that_begin_anew_refuse_each_other(roster, tmp_path):
    fresh: dict[str, Any] = {"paris": True, "berlin": (True, False)}

    def start(name: str) -> None:
        with (
            island_of(roster, name, tmp_path) as island,
            pytest.raises(UserError, match=r"fresh: \d of 4 arrays of rest.* here, \d of 4 arrays of rest"),
        ):
            island.begin(
                weights(), optax.adam(optax.constant_schedule(0.1)).init({"b": np.zeros(9)}), fresh=fresh[name]
            )

    side_by_side(*(lambda name=name: start(name) for name in NAMES))


@pytest.mark.parametrize(("example", "steps"), [("numpy", 100), ("nnx", 300)])
def test_both_processes_of_an_example_exchange_and_end_with_one_model(example, steps, roster, tmp_path):
    written(roster, tmp_path / "roster.toml")
    environment = processes.environment(tmp_path / "config.py")

    def command(name: str) -> list[str]:
        flags = (f"--roster={tmp_path}/roster.toml", f"--name={name}", f"--workdir={tmp_path / name}")
        return [sys.executable, "-m", f"noloco_jax.examples.island_{example}", *flags, f"--steps={steps}"]

    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [warm.Popen(command(name), env=environment, cwd=ROOT, **pipes) for name in NAMES]
    results = processes.finish(started)
    assert [status for status, _ in results] == [0, 0], processes.report(results)
    outputs = [output for _, output in results]
    last = [output.strip().splitlines()[-1] for output in outputs]
    assert last[0] == last[1] and last[0].startswith("accuracy"), outputs
    assert float(last[0].rsplit(" ", 1)[1]) >= 0.9
    for output in outputs:
        assert "exchanged with " in output and "the mean of 2 of 2 islands" in output
