"""Merging the models of islands: of training ones over the network, and of finished ones from their folders."""

import contextlib
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from noloco_jax import draws
from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.config import TrainConfig, from_dict, save_config, to_dict
from noloco_jax.data import load_tokenizer
from noloco_jax.errors import UserError
from noloco_jax.island.command import main as island
from noloco_jax.island.membership import Membership
from noloco_jax.island.merge import evaluation_of
from noloco_jax.islands.entries import MEMBERS_FILE, write_members
from noloco_jax.islands.keys import load_keys, make_keys
from noloco_jax.islands.peer_errors import BusyError
from noloco_jax.islands.protocol.members import OPEN, Entry
from noloco_jax.islands.protocol.messages import Identity
from noloco_jax.islands.roster import Address, Island, Roster
from noloco_jax.islands.server import Handlers, Server
from noloco_jax.islands.snapshots import ABOUT, Snapshots
from noloco_jax.islands.start import ISLAND_FILE, begin
from noloco_jax.islands.steps import weight_specs
from noloco_jax.model.huggingface import config_from_folder, load_params
from noloco_jax.model.kind import param_shapes
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import TrainState, build_programs
from noloco_jax.spmd.solo import build_solo
from support.rosters import on_loopback, written

NAMES = ("paris", "berlin", "rome")
ROUNDS = {"paris": 8, "berlin": 9, "rome": 6}
CONFIG = from_dict(
    {
        "num_replicas": 3,
        "model": {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1},
        "data": {"sequence_length": 8, "batch_size": 2},
    }
)


@pytest.fixture
def roster(tmp_path) -> Roster:
    """Make keys and a roster of three islands on loopback, which is also written to roster.toml."""
    roster = on_loopback(*NAMES)
    written(roster, tmp_path / "roster.toml")
    make_keys(roster, tmp_path / "keys", 30)
    return roster


def merge(folder: Path, *flags: str) -> int:
    files = [f"--roster={folder / 'roster.toml'}", f"--keys={folder / 'keys'}"]
    return island(["merge", *files, f"--out={folder / 'merged'}", "--seconds=60", *flags])


def merged(folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays of the merged model that was written below `folder`."""
    config = from_dict({"model": config_from_folder(folder / "merged")}).model
    assert config == CONFIG.model
    return named(load_params(folder / "merged", config))


def named(tree: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(tree)}


def weights(seed: int, config: TrainConfig = CONFIG) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        name: generator.standard_normal(spec.shape).astype(spec.dtype)
        for name, spec in weight_specs(config.model).items()
    }


def mean(*models: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.mean([model[name].astype(np.float64) for model in models], axis=0) for name in models[0]}


def assert_equal(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-6, atol=1e-7, err_msg=name)


class Fake:
    """An island's server that has weights and trains nothing.

    Attributes:
      about: its answer to a question about itself.
      arrays: its weights, by name.
      fails_after: number of arrays sent before a failure; None: no failure.
      asked: number of requests for its weights.
    """

    def __init__(self, roster: Roster, name: str, folder: Path, seed: int, **changes: Any):
        identity = Identity("test", {"seed": "1"}, "model", roster.version, "float32, 1 fragments", "steps", "byte")
        about = {"config": to_dict(CONFIG), "tokenizer": "byte", "round": 5 + seed, "training": True}
        self.about: dict[str, Any] = {"identity": asdict(identity), **about, **changes}
        self.arrays, self.asked = weights(seed), 0
        self.fails_after: int | None = None
        handlers = Handlers(lambda *_: None, self._state, {ABOUT: lambda *_: self.about}, lambda line: None)
        self.server = Server(roster, name, load_keys(folder / "keys" / name, name), handlers)

    def _state(self, caller: str, request: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
        self.asked += 1
        sent = [("progress", np.asarray([self.about["round"], 70], np.int64)), *self.arrays.items()]
        yield from sent[: self.fails_after]
        if self.fails_after is not None:
            raise RuntimeError("injected failure")


@contextlib.contextmanager
def islands(roster: Roster, folder: Path, *names: str) -> Iterator[dict[str, Fake]]:
    fakes = {name: Fake(roster, name, folder, seed) for seed, name in enumerate(names)}
    try:
        yield fakes
    finally:
        for fake in fakes.values():
            fake.server.close()


def test_an_island_of_a_newer_version_with_unknown_fields_is_merged(roster, tmp_path):
    with islands(roster, tmp_path, "paris", "rome") as fakes:
        newer = fakes["rome"].about
        fakes["rome"].about = newer | {"identity": {**newer["identity"], "later": 1}, "later": 2}
        assert merge(tmp_path) == 0
    assert_equal(merged(tmp_path), mean(weights(0), weights(1)))


def test_the_merged_model_is_the_plain_mean_of_the_islands_that_answer(roster, tmp_path, capsys):
    with islands(roster, tmp_path, "paris", "rome"):
        assert merge(tmp_path) == 0
    assert_equal(merged(tmp_path), mean(weights(0), weights(1)))
    lines = capsys.readouterr().out.splitlines()
    assert any(re.match("berlin .*nobody", line) for line in lines)
    assert {"paris: weights after round 6", "rome: weights after round 7"} <= set(lines)
    assert any("the mean of 2 of 3 islands, up to 1 rounds apart, without berlin" in line for line in lines)


def test_an_island_that_fails_while_sending_is_left_out_of_the_mean(roster, tmp_path, capsys):
    with islands(roster, tmp_path, *NAMES) as fakes:
        fakes["berlin"].fails_after = 3
        assert merge(tmp_path) == 0
    assert_equal(merged(tmp_path), mean(weights(0), weights(2)))
    assert "the mean of 2 of 3 islands" in capsys.readouterr().out


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_an_island_whose_weights_are_not_finite_is_named_and_left_out(roster, tmp_path, capsys, value):
    with islands(roster, tmp_path, "paris", "rome") as fakes:
        name, array = list(fakes["rome"].arrays.items())[-1]
        array.reshape(-1)[-1] = value
        assert merge(tmp_path) == 0
    assert_equal(merged(tmp_path), mean(weights(0)))
    assert any(f"rome's weights are not finite, {name}" in line for line in capsys.readouterr().out.splitlines())


def test_fewer_islands_than_asked_for_are_refused_and_nothing_is_written(roster, tmp_path):
    with islands(roster, tmp_path, "paris", "rome") as fakes:
        with pytest.raises(UserError, match=r"of 2 islands can be had, not those of berlin, and --at_least=3"):
            merge(tmp_path, "--at_least=3")
        fakes["paris"].about["training"] = False
        with pytest.raises(UserError, match=r"of 1 islands can be had, not those of berlin, paris, and --at_least=2"):
            merge(tmp_path, "--at_least=2")
    with pytest.raises(UserError, match=r"none of test's islands answers .* --workdirs DIR DIR"):
        merge(tmp_path)
    assert not (tmp_path / "merged").exists()


def test_no_more_weights_are_fetched_once_too_few_islands_remain(roster, tmp_path):
    with islands(roster, tmp_path, *NAMES) as fakes:
        fakes["paris"].fails_after = 2
        with pytest.raises(UserError, match=r"of 2 islands can be had, not those of paris, and --at_least=3"):
            merge(tmp_path, "--at_least=3")
        assert [fakes[name].asked for name in NAMES] == [1, 0, 0]


@pytest.mark.parametrize("part", ["model", "config", "codec", "tokenizer"])
def test_islands_with_another_model_config_codec_or_tokenizer_are_refused(roster, tmp_path, part):
    named = "seed" if part == "config" else part
    with islands(roster, tmp_path, *NAMES) as fakes:
        fakes["rome"].about["identity"][part] = {"seed": "2"} if part == "config" else "another"
        with pytest.raises(UserError, match=f"cannot be merged: {named}: .* at rome, .* at paris"):
            merge(tmp_path)


def test_islands_of_another_roster_are_refused(roster, tmp_path):
    with islands(roster, tmp_path, "paris") as fakes:
        fakes["paris"].about["identity"]["roster"] = "another"
        with pytest.raises(UserError, match=r"paris is of the run test, roster another, and this roster is"):
            merge(tmp_path)


def test_weights_that_do_not_fit_the_configuration_are_left_out(roster, tmp_path, capsys):
    with islands(roster, tmp_path, "paris", "rome") as fakes:
        fakes["rome"].arrays["['embed']"] = np.zeros((3, 3), np.float32)
        assert merge(tmp_path) == 0
    assert_equal(merged(tmp_path), weights(0))
    assert "would fit here" in capsys.readouterr().out


def test_a_local_tokenizer_other_than_that_of_the_islands_is_refused(roster, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.py").write_text("words " * 100)
    data = {"kind": "text", "path": str(text), "sequence_length": 8, "batch_size": 2}
    with islands(roster, tmp_path, "paris") as fakes:
        fakes["paris"].about |= {"config": {**to_dict(CONFIG), "data": data}, "tokenizer": "other"}
        with pytest.raises(UserError, match=r"data.tokenizer='byte' is here not the one that paris is trained with"):
            merge(tmp_path)


def test_training_islands_hand_over_their_weights_between_two_steps(roster, tmp_path):
    """Real agents and states; each island must hand over the weights that its own program holds."""
    own = Membership(roster, "paris", None).own(CONFIG)
    programs = build_programs(own, make_mesh(own, jax.devices()[:1]))
    solo = build_solo(own, programs)
    is_over, steps = threading.Event(), {str(name): 0 for name in NAMES}
    states = {str(name): programs.init(draws.key(seed)) for seed, name in enumerate(NAMES)}
    models = [named(jax.tree.map(lambda x: np.array(x[0]), state.params)) for state in states.values()]
    members = {str(name): Membership(roster, name, load_keys(tmp_path / "keys" / name, name)) for name in NAMES}

    def train(name: str) -> None:
        arguments = (None, tmp_path / name, lambda: False, lambda line: None)
        agent = members[name].open_agent(CONFIG, solo, programs, *arguments, "byte")
        assert agent is not None and begin(agent, tmp_path / name, lambda: False)
        steps_of_island = members[name].steps(CONFIG, agent, solo, programs)
        while not is_over.wait(0.005):
            steps[name] += 1
            params = jax.tree.map(lambda x: x + 1, states[name].params)  # the inner step
            states[name], _ = steps_of_island.enter(states[name]._replace(params=params), steps[name])
        agent.close()

    threads = [threading.Thread(target=train, args=(name,), daemon=True) for name in NAMES]
    for thread in threads:
        thread.start()
    try:
        while not all(steps.values()):
            is_over.wait(0.01)
        assert merge(tmp_path, "--at_least=3") == 0
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)
    assert np.abs(models[0]["['embed']"] - models[1]["['embed']"]).max() > 1e-3
    model, expected = merged(tmp_path), mean(*models)
    taken = [model[name] - expected[name] for name in expected]  # the mean number of steps, the same in every array
    assert taken[0].mean() > 0.5
    for difference in taken:
        np.testing.assert_allclose(difference, taken[0].mean(), atol=1e-3)


def test_a_merge_client_that_does_not_read_does_not_block_training():
    snapshots = Snapshots(weight_specs(CONFIG.model))
    first = snapshots.state("berlin", {})
    received: list[Any] = []
    thread = threading.Thread(target=lambda: received.append(next(first)), daemon=True)
    thread.start()
    while not snapshots.wanted:
        pass
    given = [x + 0 for x in weights(0).values()]
    snapshots.give(3, 40, given)  # returns at once
    assert not snapshots.wanted  # later steps copy nothing for this client
    thread.join(60)
    assert received[0][0] == "progress" and received[0][1].tolist() == [3, 40]
    with pytest.raises(BusyError, match="another merge is under way"):
        next(snapshots.state("rome", {}))
    assert [name for name, _ in first] == list(weight_specs(CONFIG.model))
    snapshots.close()
    with pytest.raises(BusyError, match="about to stop"):
        next(snapshots.state("rome", {}))


def write_finished(
    workdir: Path, config: TrainConfig, seed: int, round: int, first: float | None = None
) -> dict[str, np.ndarray]:
    """Write the folder of a finished island, its first weight set to `first` if given; return its weights."""
    params = jax.tree.map_with_path(
        lambda path, _: weights(seed, config)[jax.tree_util.keystr(path)], param_shapes(config.model)
    )
    if first is not None:
        jax.tree.leaves(params)[0].reshape(-1)[0] = first
    state = TrainState(params=jax.tree.map(lambda x: x[None], params), inner={"count": np.zeros(1)}, outer=None)
    journal = {"round": round, "lineage": True, "outcomes": [], "floor": 0, "doubts": []}
    save_config(config, workdir)
    (workdir / ISLAND_FILE).write_text("{}")
    with Checkpointer(workdir, config) as checkpointer:
        checkpointer.save(9, state, {0: {"source": {"tokenizer": "byte"}, "replica": seed}}, beside=journal)
    return named(params)


def test_checkpoints_of_folders_are_merged_whatever_their_rounds(tmp_path, capsys):
    models = [write_finished(tmp_path / name, CONFIG, seed, round) for seed, (name, round) in enumerate(ROUNDS.items())]
    flags = ["merge", "--workdirs", *(str(tmp_path / name) for name in ROUNDS), f"--out={tmp_path / 'merged'}"]
    assert island(flags) == 0
    assert_equal(merged(tmp_path), mean(*models))
    assert "the mean of 3 of 3 islands, up to 3 rounds apart" in capsys.readouterr().out
    with pytest.raises(UserError, match="already holds something"):
        island(flags)


def test_a_checkpoint_whose_weights_are_not_finite_is_named_and_left_out(tmp_path, capsys):
    """Checkpoints of earlier versions may hold such weights."""
    sound = write_finished(tmp_path / "paris", CONFIG, 0, 8)
    write_finished(tmp_path / "rome", CONFIG, 1, 8, np.nan)
    folders = [str(tmp_path / name) for name in ("paris", "rome")]
    assert island(["merge", "--workdirs", *folders, f"--out={tmp_path / 'merged'}"]) == 0
    assert_equal(merged(tmp_path), sound)
    assert "rome: the checkpoint's weights are not finite" in capsys.readouterr().out.replace("\n", " ")


def test_the_folder_of_a_removed_member_is_named_and_left_out(tmp_path, capsys):
    """The folder of paris records the removals of rome and oslo, and that of oslo its own return."""
    models = [write_finished(tmp_path / name, CONFIG, seed, 8) for seed, name in enumerate(("paris", "rome", "oslo"))]
    roster = Roster("test", tuple(Island(name, Address("127.0.0.1", 7070 + i)) for i, name in enumerate(ROUNDS)))
    removals = [Entry(id, name, "", 0, 9, 0, 1) for id, name in enumerate(("paris", "rome", "oslo")) if id]
    write_members(tmp_path / "paris" / MEMBERS_FILE, roster, removals)
    write_members(tmp_path / "oslo" / MEMBERS_FILE, roster, [replace(removals[1], until_round=OPEN, version=2)])
    folders = [str(tmp_path / name) for name in ("paris", "rome", "oslo")]
    assert island(["merge", "--workdirs", *folders, f"--out={tmp_path / 'merged'}"]) == 0
    assert_equal(merged(tmp_path), mean(models[0], models[2]))
    told = capsys.readouterr().out.replace("\n", " ")
    assert "rome is removed: no member from round 10 on, and its weights are left out" in told
    assert "the mean of 2 of 3 islands" in told and "without rome" in told


def test_folders_that_do_not_belong_together_are_refused(tmp_path):
    first, second = tmp_path / "paris", tmp_path / "rome"
    for folder, lr in ((first, 0.1), (second, 0.5)):
        save_config(replace(CONFIG, inner=replace(CONFIG.inner, lr=lr)), folder)
        (folder / ISLAND_FILE).write_text("{}")
    (tmp_path / "plain").mkdir()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / ISLAND_FILE).write_text("{}")  # and no configuration
    for folders, line in (
        ((first, second), "do not belong together, their inner differs"),
        ((first, tmp_path / "plain"), "is no folder of an island"),
        ((first, tmp_path / "own"), "own is of an island in a loop of its own .*call island.merge"),
        ((first, first), "names a folder twice"),
    ):
        with pytest.raises(UserError, match=line):
            island(["merge", "--workdirs", *map(str, folders), f"--out={tmp_path / 'merged'}"])
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("kind", ["copy", "link", "path"])
def test_two_folders_of_one_island_are_refused(tmp_path, kind):
    """Guard a regression: the island was counted twice."""
    for seed, name in enumerate(("paris", "rome")):
        write_finished(tmp_path / name, CONFIG, seed, 8)
    other = tmp_path / ("rome/../paris" if kind == "path" else "other")
    if kind == "copy":
        shutil.copytree(tmp_path / "paris", other)
    if kind == "link":
        other.symlink_to("paris")
    said = "{1} and {0} are both of replica 0" if kind == "copy" else "names a folder twice, {0} and {1}"
    folders = [str(tmp_path / "paris"), str(tmp_path / "rome"), str(other)]
    with pytest.raises(UserError, match=re.escape(said.format(folders[0], folders[2]))):
        island(["merge", "--workdirs", *folders, f"--out={tmp_path / 'merged'}"])
    assert not (tmp_path / "merged").exists()


def test_contradictory_or_invalid_flags_are_refused(tmp_path):
    out = f"--out={tmp_path / 'merged'}"
    for flags, line in (
        ([out], "give --roster=FILE of islands that train, or --workdirs"),
        ([out, "--roster=a", "--workdirs", "b"], "give --roster=FILE of islands that train, or --workdirs"),
        ([out, "--workdirs", "b", "--config.num_steps=3"], "merge takes no fields but --config.data.NAME=VALUE"),
        ([out, "--workdirs", "b", "--seconds=0"], "--seconds=0.0: give more than 0"),
    ):
        with pytest.raises(UserError, match=re.escape(line)):
            island(["merge", *flags])


def test_the_perplexity_of_a_merged_model_is_computed_from_its_weights(tmp_path):
    (tmp_path / "a.py").write_text("".join(f"x{i} = {i * i % 97}\n" for i in range(3000)))
    values = to_dict(CONFIG)
    values["data"] = {"kind": "text", "path": str(tmp_path), "sequence_length": 8, "batch_size": 2}
    config = from_dict({**values, "eval_batches": 2})
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), param_shapes(config.model))
    found = evaluation_of(config, zeros, load_tokenizer("byte"))["perplexity"]
    assert found == pytest.approx(config.model.vocab_size, rel=1e-5)  # zero logits make all tokens equally likely
