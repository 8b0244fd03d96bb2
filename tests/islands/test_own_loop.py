"""Islands in a user's own loop: `nj.Island`."""

import dataclasses
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import noloco_jax as nj
from noloco_jax.errors import UserError
from noloco_jax.island.command import main as command_line
from noloco_jax.islands.checkpoints import OwnCheckpoints
from noloco_jax.islands.forms import summary
from noloco_jax.islands.fresh import Fresh, begins_anew
from noloco_jax.islands.own_outer import shown
from noloco_jax.islands.own_state import OwnState
from noloco_jax.islands.payload import ArraySpec
from noloco_jax.islands.roster import Roster
from support import processes, warm
from support.at_once import side_by_side, wait_for_exchanges
from support.live_island import wait_for
from support.paths import ROOT
from support.ports import free_ports
from support.rosters import on_loopback, written
from support.training_islands import begin_without

NAMES = ("paris", "berlin")
SHAPES = {"w": (64, 96), "b": (96,)}
STEPS = 12


@pytest.fixture
def roster() -> Roster:
    return on_loopback(*NAMES, run="own")


def quiet(line: str) -> None:
    del line


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
        with nj.Island(roster, name, workdir=folder / name, outer=outer(), report=quiet) as island:
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


@pytest.mark.parametrize("options", [{}, {"fragments": 2, "wire": "int8"}, {"fragments": 2, "wire": "modulo4"}])
def test_islands_in_a_users_loop_match_an_optax_loop_and_merge_into_the_mean(options, roster, tmp_path):
    def outer(*pairing: Any) -> Any:
        return nj.noloco(*pairing, sync_every=5, **options)

    found, expected = trained(roster, tmp_path, outer), in_one_program(outer)
    for number, name in enumerate(NAMES):
        for key, x in found[name][0].items():
            assert np.mean(np.abs(x - expected[key][number]) > 1e-6) < 1e-3, (name, key)
    for key in SHAPES:
        last = [found[name][0][key] for name in NAMES]
        assert np.abs(last[0] - last[1]).max() > 1e-4
        for name in NAMES:
            np.testing.assert_allclose(found[name][1][key], np.mean(last, axis=0), atol=1e-6)


def sharded() -> tuple[Any, Any]:
    """Return weights sharded over four devices, and a `rest` with a leaf of every kind."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    places = {"w": NamedSharding(mesh, P(None, "data")), "b": NamedSharding(mesh, P())}
    params = {key: jax.device_put(x, places[key]) for key, x in weights().items()}
    rest = {
        "moment": jax.tree.map(jnp.zeros_like, params),
        "count": jnp.zeros([], jnp.int32),
        "key": jax.random.key(3),
        "epoch": 2,
        "host": np.arange(3) + 2**40,
        "tokens": 3_000_000_007,
        "time": 1234567890.123,
        "seed": np.uint64(2**40 + 1),
    }
    return params, rest


def assert_same_form(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(mine) is type(theirs)
        if isinstance(mine, jax.Array):
            assert (mine.dtype, mine.sharding, mine.committed) == (theirs.dtype, theirs.sharding, theirs.committed)


def assert_equal(found: Any, expected: Any) -> None:
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if isinstance(mine, jax.Array) and jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
            mine, theirs = jax.random.key_data(mine), jax.random.key_data(theirs)
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


def test_a_checkpoint_restores_values_shardings_random_keys_and_numbers(roster, tmp_path):
    saved: dict[str, Any] = {}

    def train(name: str) -> None:
        arguments: dict[str, Any] = {"workdir": tmp_path / name, "outer": nj.noloco(sync_every=4), "report": quiet}
        with nj.Island(roster, name, **arguments) as island:
            params, rest, step = island.begin(*sharded())
            both.wait()
            while step < 6:
                params = jax.tree.map(lambda x: x + 1e-3 * (1 + NAMES.index(name)), params)
                rest = {**rest, "epoch": step, "key": jax.random.split(rest["key"])[0]}
                params, rest, step = island.step(params, rest)
            with saving:  # Orbax mixes up concurrent saves in one process
                saved[name] = island.save(params, rest), step
                assert island._checkpoints is not None
                island._checkpoints.close()
        both.wait()
        with nj.Island(roster, name, **arguments) as island:
            params, rest, step = island.begin(*sharded())
            assert step == saved[name][1]
            assert_equal((params, rest), saved[name][0])
            assert_same_form((params, rest), sharded())
            outer = jax.tree.leaves(island._state_of_outer)
            assert {x.sharding.spec for x in outer if x.ndim == 3} == {P(None, None, "data")}
            both.wait()

    both, saving = threading.Barrier(2, timeout=300), threading.Lock()
    side_by_side(*(lambda name=name: train(name) for name in NAMES))


@pytest.mark.parametrize("catch_up", ["weights", "whole"])
def test_a_late_island_continues_from_the_weights_and_the_step_of_its_peers(catch_up, tmp_path, monkeypatch):
    begin_without(monkeypatch, "rome")
    names = (*NAMES, "rome")
    roster = on_loopback(*names, run="own")
    is_over, late = threading.Event(), threading.Event()
    found: dict[str, Any] = {}
    tx = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda step: 1e-3 / (1 + step)))

    def first(name: str) -> Any:
        return {"steps": 0, "tokens": 2**40 + 1, "name": np.array([names.index(name)]), "adam": tx.init(weights())}

    def train(name: str) -> None:
        with nj.Island(roster, name, workdir=tmp_path / name, outer=nj.noloco(sync_every=2), report=quiet) as island:
            params, rest, step = island.begin(weights(), first(name))
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
        with nj.Island(
            roster, "rome", workdir=tmp_path / "rome", outer=nj.noloco(sync_every=2), catch_up=catch_up, report=quiet
        ) as it:
            params, rest, step = it.begin(weights(), first("rome"))
            found.update(params=params, rest=rest, step=step)
        is_over.set()

    side_by_side(*(lambda name=name: train(name) for name in NAMES), join_late)
    assert found["step"] > 15 and found["rest"]["steps"] == found["step"]
    assert found["rest"]["name"].item() in (0, 1) and found["rest"]["tokens"] == 2**40 + 1
    moments, schedule = found["rest"]["adam"]
    assert int(schedule.count) == found["step"] and (int(moments.count) > 0) is (catch_up == "whole")
    assert any(np.any(x) for x in jax.tree.leaves((moments.mu, moments.nu))) is (catch_up == "whole")
    assert not np.array_equal(found["params"]["w"], weights()["w"])


def test_only_weight_shaped_floats_and_leaves_directly_beside_them_begin_anew():
    params = weights()
    rest = {
        "adam": optax.adam(optax.constant_schedule(1e-3)).init(params),
        "average": {"weights": params},
        "key": jax.random.key_data(jax.random.key(0)),
        "seen": np.zeros(96, np.int32),  # of a weight's shape, but integers
        "step": np.zeros([], np.int64),
    }
    flags = jax.tree.unflatten(jax.tree.structure(rest), begins_anew(rest, params))
    assert all(jax.tree.leaves(flags["adam"][0])) and not any(jax.tree.leaves(flags["adam"][1]))
    assert all(jax.tree.leaves(flags["average"]))
    assert not (flags["key"] or flags["seen"] or flags["step"])
    fresh = Fresh(jax.tree.leaves(rest), jax.tree.leaves(flags))
    for number, (x, flag) in enumerate(zip(jax.tree.leaves(rest), jax.tree.leaves(flags), strict=True)):
        value = fresh.leaf(number)
        assert (value is not None) is flag
        if value is not None:
            np.testing.assert_array_equal(value, x)
            assert value.dtype == x.dtype


def test_factored_moments_begin_anew_with_their_counter():
    params = {"w": np.zeros([128, 256], np.float32), "b": np.zeros([256], np.float32)}
    rest = {"adafactor": optax.adafactor(optax.constant_schedule(1e-3)).init(params), "step": np.zeros([], np.int64)}
    flags = jax.tree.unflatten(jax.tree.structure(rest), begins_anew(rest, params))
    factored, *others = flags["adafactor"]
    assert all(jax.tree.leaves(factored)) and not any(jax.tree.leaves([*others, flags["step"]]))


def test_an_invited_island_joins_running_loops_and_exchanges_with_both(roster, tmp_path):
    written(roster, tmp_path / "roster.toml")
    keys, (port,) = tmp_path / "keys", free_ports(1)
    assert command_line(["keys", f"--roster={tmp_path / 'roster.toml'}", f"--out={keys}"]) == 0
    said: dict[str, list[str]] = {name: [] for name in (*NAMES, "oslo")}
    is_over = threading.Event()

    def train(name: str, roster: Path) -> None:
        arguments: dict[str, Any] = {"keys": keys / name, "workdir": tmp_path / name, "report": said[name].append}
        with nj.Island(roster, name, outer=nj.noloco(sync_every=4), **arguments) as island:
            params, _, step = island.begin(weights())
            while not is_over.wait(0.05):
                params, _, step = island.step(moved(params, "paris", step))

    def has_met(name: str, other: str) -> bool:
        return any(f"met {other}" in line for line in said[name])

    def join_running() -> None:
        wait_for(lambda: has_met("paris", "berlin"))
        assert command_line(["invite", "--name=oslo", f"--address=127.0.0.1:{port}", f"--keys={keys}"]) == 0
        train("oslo", keys / "oslo" / "members.json")

    def watch() -> None:
        try:
            wait_for(lambda: all(has_met(name, "oslo") and has_met("oslo", name) for name in NAMES))
            merge = ["merge", f"--roster={tmp_path / 'roster.toml'}", f"--keys={keys}", f"--out={tmp_path / 'merged'}"]
            with pytest.raises(UserError, match=r"is a loop of your own"):
                command_line(merge)
        finally:
            is_over.set()

    side_by_side(*(lambda name=name: train(name, tmp_path / "roster.toml") for name in NAMES), join_running, watch)


@pytest.mark.parametrize(
    ("outer", "line"),
    [
        (lambda: nj.diloco(), "islands meet in pairs: give outer=noloco_jax.noloco"),
        (lambda: optax.adam(1e-3), "islands meet in pairs: give outer=noloco_jax.noloco"),
        (lambda: nj.noloco(sync_every=4, delay=2), "delay=2 is not for islands"),
        (lambda: nj.noloco(nj.RandomPairing(4)), "the pairing is of 4 replicas in groups of 2, and the roster has 2"),
    ],
)
def test_an_outer_optimizer_unsupported_by_islands_is_refused_with_the_reason(outer, line, roster, tmp_path):
    with pytest.raises(ValueError, match=re.escape(line)):
        nj.Island(roster, "paris", workdir=tmp_path, outer=outer())


def test_an_outer_step_in_a_program_without_a_pairing_is_refused():
    tx = nj.noloco(sync_every=1)
    params = {key: np.stack([x] * 2) for key, x in weights().items()}
    state: Any = jax.vmap(tx.init)(params)
    with pytest.raises(ValueError, match="noloco has no pairing"):
        jax.vmap(tx.step, axis_name="replica")(params, state)


@pytest.fixture
def begun_island(roster, tmp_path) -> Iterator[tuple[Any, Any]]:
    """Yield island paris and the result of its `begin`, once its peer has begun too."""
    with ExitStack() as stack:
        begun: dict[str, Any] = {}

        def start(name: str) -> None:
            island = nj.Island(roster, name, workdir=tmp_path / name, outer=nj.noloco(sync_every=2), report=quiet)
            stack.enter_context(island)
            begun[name] = island, island.begin(weights(), (0, np.zeros(2)))

        side_by_side(*(lambda name=name: start(name) for name in NAMES))
        yield begun["paris"]


def test_a_tree_of_changed_structure_shape_or_dtype_is_refused_naming_the_leaf(begun_island):
    island, (params, rest, _) = begun_island
    with pytest.raises(ValueError, match="params changed its structure"):
        island.step({"w": params["w"]}, rest)
    with pytest.raises(ValueError, match=r"params\['w'\] was float32\[64, 96\]"):
        island.step({**params, "w": params["w"][1:]}, rest)
    with pytest.raises(ValueError, match=r"rest\[1\] was float64\[2\]"):
        island.step(params, (1, np.zeros(2, np.float32)))
    for number in (0.5, jnp.float32(1), 2**70):
        with pytest.raises(ValueError, match=r"rest\[0\] was of int at first and is .* now: begin with a number"):
            island.step(params, (number, np.zeros(2)))
    assert island.step(params, rest)[2] == 1


@pytest.mark.parametrize("leaf", ["text", None.__class__, object()])
def test_a_leaf_that_is_not_an_array_is_refused_by_name(leaf, roster, tmp_path):
    with (
        nj.Island(roster, "paris", workdir=tmp_path, outer=nj.noloco(), report=quiet) as island,
        pytest.raises(ValueError, match=r"rest\['x'\] is .*: give JAX or NumPy arrays, numbers or random keys"),
    ):
        island.begin(weights(), {"x": leaf})


@pytest.mark.parametrize(
    ("params", "rest", "line"),
    [
        ({"w": np.zeros(4)}, (), "params['w'] is float64, and JAX computes it in float32: convert it"),
        ({"w": np.zeros(4, np.float32), "b": 0.0}, (), "params['b'] is float64"),
        ({"w": np.zeros(4, np.float32)}, {"none": np.zeros((0, 3))}, "rest['none'] has no elements"),
        (
            {"w": np.zeros(4, np.float32)},
            {"large": 2**100},
            "rest['large'] holds Python objects, or an integer of more",
        ),
    ],
)
def test_leaves_that_would_not_come_back_alike_are_refused_at_the_start(params, rest, line, roster, tmp_path):
    with (
        nj.Island(roster, "paris", workdir=tmp_path, outer=nj.noloco(), report=quiet) as island,
        pytest.raises(ValueError, match=re.escape(line)),
    ):
        island.begin(params, rest)


def test_schedules_of_the_outer_step_are_compared_by_their_values():
    halves, tenths = (lambda round: 0.5 + 0 * round), (lambda round: 0.1 + 0 * round)
    assert shown(halves) == shown(lambda round: 0.5) != shown(tenths)
    assert shown(optax.linear_schedule(0.5, 0.1, 50)) != shown(optax.linear_schedule(0.5, 0.1, 500))
    assert shown(0.5) == "0.5"


def test_weights_that_are_not_finite_are_not_saved(begun_island, tmp_path):
    island, (params, rest, _) = begun_island
    params = {**params, "b": np.full(96, np.nan, np.float32)}
    with pytest.raises(UserError, match=r"after step 0 have values that are not finite, and are not saved"):
        island.save(params, rest)
    assert not list((tmp_path / "paris" / "checkpoints").iterdir())


def test_an_island_saves_after_a_merge_in_which_a_correction_arrived(roster, tmp_path):
    """Regression test: the outer state from before the merge had been donated."""
    saved: dict[str, Any] = {}

    def train(name: str) -> None:
        with nj.Island(roster, name, workdir=tmp_path / name, outer=nj.noloco(sync_every=2), report=quiet) as island:
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
            np.testing.assert_array_equal(saved[name]["w"], merged["w"])
            both.wait()

    both, saving = threading.Barrier(2, timeout=300), threading.Lock()
    side_by_side(*(lambda name=name: train(name) for name in NAMES))
    assert all((tmp_path / name / "checkpoints" / "2").is_dir() for name in NAMES)


def test_a_second_begin_is_refused(begun_island):
    with pytest.raises(ValueError, match="the island has begun already: call begin once, before the first step"):
        begun_island[0].begin(weights(), (0, np.zeros(2)))


def test_a_second_save_of_a_step_replaces_the_first_once_it_is_whole(tmp_path):
    def opened() -> OwnCheckpoints:
        return OwnCheckpoints(tmp_path, {"w": ArraySpec((3,), np.dtype(np.float32))}, keep=3)

    def restored() -> list[float]:
        checkpoints = opened()
        arrays, _ = checkpoints.restore(5, [jax.ShapeDtypeStruct((3,), np.float32)])
        checkpoints.close()
        return np.asarray(arrays[0]).tolist()

    checkpoints = opened()
    for value in (1.0, 2.0, 3.0):
        checkpoints.save(5, [np.full(3, value, np.float32)], {})
    checkpoints.close()
    assert restored() == [3.0] * 3
    folder = tmp_path / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["5"]
    (folder / "5").rename(folder / "5.replaced")  # as if killed before the next one was whole
    assert restored() == [3.0] * 3


def test_a_checkpoint_that_is_damaged_or_holds_other_arrays_is_refused(begun_island, roster, tmp_path):
    island, (params, rest, _) = begun_island
    island.save(params, rest)
    island.__exit__(None, None, None)
    arguments: dict[str, Any] = {"workdir": tmp_path / "paris", "outer": nj.noloco(sync_every=2), "report": quiet}
    with (
        nj.Island(roster, "paris", **arguments) as other,
        pytest.raises(UserError, match=r"other arrays \(params\['b'\]: float32\[96\] there, float32\[95\] here\)"),
    ):
        other.begin({**weights(), "b": np.zeros(95, np.float32)}, rest)
    data = max((tmp_path / "paris/checkpoints/0").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(bytes(content))
    with (
        nj.Island(roster, "paris", **arguments) as other,
        pytest.raises(UserError, match=r"cannot be read .*move it aside"),
    ):
        other.begin(weights(), rest)


def test_windows_saved_for_other_fragments_are_refused(tmp_path):
    def opened(**settings: Any) -> OwnCheckpoints:
        specs = OwnState(nj.noloco(sync_every=2, **settings), weights(), ()).saved_specs
        specs = {name: spec for name, spec in specs.items() if name == "fragments"}
        return OwnCheckpoints(tmp_path, {"w": ArraySpec((3,), np.dtype(np.float32)), **specs}, keep=3)

    checkpoints = opened(fragments=2, wire="modulo4")
    checkpoints.save(5, [np.zeros(3, np.float32)], {})
    checkpoints.close()
    like = [jax.ShapeDtypeStruct((3,), np.float32)]
    for settings in ({"fragments": 2, "wire": "modulo4"}, {"fragments": 4, "wire": "modulo4"}, {"fragments": 2}):
        checkpoints = opened(**settings)
        is_same = settings == {"fragments": 2, "wire": "modulo4"}
        with nullcontext() if is_same else pytest.raises(UserError, match=r"\(fragments: 2 fragments.* there, .* here"):
            checkpoints.restore(5, like)
        checkpoints.close()


def normal(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"w": rng.normal(size=(30, 40)).astype(np.float32), "norm": np.ones(7, np.float32)}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (lambda name: {"common": {"lr": 0.2 if name == "rome" else 0.1}}, "common.lr: 0.2 here, 0.1 at"),
        (lambda name: {"seed": int(name == "rome")}, r"first weights: norm 3\S+ and sum \S+ x norm here, norm 3"),
    ],
    ids=["common", "first weights"],
)
def test_an_island_with_a_different_value_is_refused_naming_the_value(given, line, tmp_path, monkeypatch):
    names = (*NAMES, "rome")
    roster = on_loopback(*names, run="own")
    refused: list[BaseException] = []

    def start(name: str) -> None:
        options = given(name)
        first = normal(options.pop("seed", 0))
        outer = nj.noloco(sync_every=2)
        with nj.Island(roster, name, workdir=tmp_path / name, outer=outer, report=quiet, **options) as island:
            try:
                island.begin(first)
                is_refused.wait(300)
            except UserError as error:
                refused.append(error)
                begin_without(monkeypatch, name)
                is_refused.set()

    is_refused = threading.Event()
    side_by_side(*(lambda name=name: start(name) for name in names))
    assert len(refused) == 1 and re.search(line, str(refused[0]))


def test_a_summary_of_weights_tells_seeds_apart_and_not_last_bits():
    one = normal(0)
    assert summary(one) == summary(jax.tree.map(lambda x: np.nextafter(x, 9), one)) == summary(normal(0))
    assert len({summary(normal(seed)) for seed in range(20)}) == 20
    assert summary({"w": np.zeros(3, np.float32)}) == "norm 0 and sum 0.00 x norm"


@pytest.mark.parametrize(
    ("example", "steps", "figure", "least", "most"),
    [("numpy", 100, "accuracy", 0.9, 1.0), ("nnx", 300, "accuracy", 0.9, 1.0)],
)
def test_both_processes_of_an_example_exchange_and_end_with_one_model(
    example, steps, figure, least, most, roster, tmp_path
):
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
    assert last[0] == last[1] and last[0].startswith(figure), outputs
    assert least <= float(last[0].rsplit(" ", 1)[1]) <= most
    for output in outputs:
        assert " met " in output and "the mean of 2 of 2 islands" in output


@pytest.mark.parametrize("options", [{}, {"fragments": 3}])
def test_islands_in_a_users_loop_are_paired_like_replicas_of_an_optax_loop(options, tmp_path):
    names = ("paris", "berlin", "rome", "oslo")
    roster = on_loopback(*names, run="own")
    outer, pairing = nj.noloco(**options), nj.RandomPairing(4)
    islands = [nj.Island(roster, name, workdir=tmp_path / name, outer=outer, report=quiet) for name in names]
    for number in range(12):
        draw, fragment = divmod(number, options.get("fragments", 1))
        expected = {
            names[i]: names[j]
            for pair in pairing.pool[int(pairing.pool_index(draw, fragment))]
            for i, j in (pair, pair[::-1])
        }
        assert {name: it._partner(names, number, name) for name, it in zip(names, islands, strict=True)} == expected


def test_outer_optimizers_keep_their_schedule_and_fragments():
    outer = nj.noloco(sync_every=6, fragments=3)
    assert dataclasses.astuple(outer.steps.schedule) == (6, 3, 0) and outer.steps.fragments.count == 3
