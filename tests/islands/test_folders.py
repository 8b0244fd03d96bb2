"""Scattering a run of one program to islands' folders, and gathering such folders to a run."""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from noloco_jax.checkpoint import elastic
from noloco_jax.checkpoint.store import Checkpointer
from noloco_jax.checkpoint.totals import Totals
from noloco_jax.checkpoint.trained_model import load_for_export
from noloco_jax.config import TrainConfig, from_dict, load_saved, save_config
from noloco_jax.data import Stream
from noloco_jax.data.tokenizers import ByteTokenizer
from noloco_jax.errors import UserError
from noloco_jax.island.command import main as island
from noloco_jax.island.folders import gather
from noloco_jax.island.membership import Membership
from noloco_jax.islands.protocol.island import Journal
from noloco_jax.islands.protocol.members import OPEN, Entry, Members
from noloco_jax.islands.roster import Address, Island, Roster
from noloco_jax.spmd.mesh import make_mesh
from noloco_jax.spmd.programs import TrainState, build_programs
from support import tiny_model
from support.data_makers import train_stream
from support.rosters import on_loopback, written
from support.texts import lines_of_words

NAMES = ("paris", "berlin", "rome")
TOTALS = Totals(tokens=3000, bytes_sent_total=5.5, seconds=7.0, seconds_waiting_for_data=1.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> TrainConfig:
    """Configuration of a run of three replicas."""
    folder = tmp_path_factory.mktemp("text")
    lines = lines_of_words(200)
    for number in range(40):
        (folder / f"{number:02}.txt").write_text("".join(lines[5 * number : 5 * number + 5]))
    return from_dict(
        {
            "num_replicas": 3,
            "model": {"kind": tiny_model.KIND, "hidden_size": 16, "intermediate_size": 32, "num_layers": 1},
            "data": {"kind": "text", "path": str(folder), "sequence_length": 32, "batch_size": 1},
        }
    )


def stream(config: TrainConfig, replica: int, num_replicas: int) -> Stream:
    return train_stream(config.data, ByteTokenizer(), replica=replica, num_replicas=num_replicas, seed=config.seed)


def random_state(config: TrainConfig) -> TrainState:
    """Make a random state of a run; scalars, which are common to all replicas, are 7."""
    generator = np.random.default_rng(0)
    shapes = build_programs(config, make_mesh(config, jax.devices()[:1])).state
    return jax.tree.map(
        lambda x: (7 + generator.random(x.shape)).astype(x.dtype) if x.ndim else np.asarray(7, x.dtype), shapes
    )


def save(workdir: Path, config: TrainConfig, step: int, state: TrainState, positions: list[dict]) -> None:
    save_config(config, workdir)
    with Checkpointer(workdir, config) as checkpoints:
        checkpoints.save(step, state, dict(enumerate(positions)), TOTALS)


def newest(workdir: Path) -> tuple[int, TrainState, list[dict], Totals]:
    """Read the newest checkpoint of a folder."""
    config = load_saved(workdir)
    with Checkpointer(workdir, config, read_only=True) as checkpoints:
        found = checkpoints.newest()
        assert found is not None
        here = replace(config, num_replicas=found.shape.num_replicas)
        state = found.state(build_programs(here, make_mesh(here, jax.devices()[:1])).state)
        return found.step, state, found.positions, found.totals


def assert_equal(state: TrainState, expected: TrainState) -> None:
    jax.tree.map(np.testing.assert_array_equal, state, expected)


class Run:
    """A run of three replicas, in DIR/run, and its islands, in DIR/islands/NAME.

    Attributes:
      state: of the run after step 12.
      batches: the next ones of each replica.
    """

    def __init__(self, folder: Path, config: TrainConfig):
        self.folder, self.config = folder, config
        self.state = random_state(config)
        streams = [stream(config, replica, 3) for replica in range(3)]
        for one, batches in zip(streams, (3, 5, 4), strict=True):
            list(itertools.islice(one, batches))
        self.positions = [one.get_state() for one in streams]
        self.batches = [list(itertools.islice(one, 4)) for one in streams]
        save(folder / "run", config, 12, self.state, self.positions)
        written(on_loopback(*NAMES), folder / "roster.toml")

    def scatter(self, *overrides: str, out: str = "islands") -> list[Path]:
        """Scatter the run to DIR/out; return the islands' folders."""
        flags = [f"--workdir={self.folder / 'run'}", f"--roster={self.folder / 'roster.toml'}"]
        assert island(["scatter", *flags, f"--out={self.folder / out}", *overrides]) == 0
        return [self.folder / out / name for name in NAMES]


@pytest.fixture(scope="module")
def made(tmp_path_factory, config) -> Run:
    """A run and its islands' folders, shared: tests must not change them."""
    run = Run(tmp_path_factory.mktemp("run"), config)
    run.scatter()
    return run


@pytest.fixture
def folders(made, tmp_path) -> list[Path]:
    """Copies of the islands' folders."""
    return [shutil.copytree(made.folder / "islands" / name, tmp_path / name) for name in NAMES]


def gathered(workdirs: list[Path], out: Path) -> list[str]:
    lines: list[str] = []
    gather(workdirs, out, lines.append)
    return lines


def test_a_scattered_island_has_its_replicas_state_and_share_of_the_totals(made, folders):
    for replica, folder in enumerate(folders):
        step, state, positions, totals = newest(folder)
        assert step == 12 and positions == [made.positions[replica]]
        own = jax.tree.map(lambda x, replica=replica: x[replica : replica + 1] if x.ndim else x, made.state)
        assert_equal(state, own)
        assert totals == replace(TOTALS, tokens=1000)


def test_one_islands_model_is_not_called_a_mean_of_replicas(made, folders):
    assert load_for_export(made.folder / "run").of == f"the mean of {len(folders)} replicas"
    assert load_for_export(folders[0]).of == "its only replica"


def test_a_scattered_island_continues_after_the_last_round_of_its_state_whatever_the_schedule(made):
    for folder in made.scatter("--config.outer.sync_every=2", out="often"):
        checkpoints = Checkpointer(folder, load_saved(folder), read_only=True)
        journal = Journal.from_json(dict(checkpoints.open(12).sync_state or {}))
        assert made.state.outer is not None and journal.round == made.state.outer.num_outer_steps - 1
        assert journal.lineage


def test_a_scattered_island_continues_its_replicas_data_stream(made, folders):
    for replica, folder in enumerate(folders):
        ((position,), one) = newest(folder)[2], stream(made.config, replica, 3)
        one.set_state(position)
        for batch, expected in zip(one, made.batches[replica], strict=False):
            jax.tree.map(np.testing.assert_array_equal, batch, expected)
        one.close()


def test_scattering_and_gathering_restores_the_run(made, folders, tmp_path):
    gathered([folders[i] for i in (2, 0, 1)], tmp_path / "run")
    step, state, positions, totals = newest(tmp_path / "run")
    assert step == 12 and positions == made.positions
    assert_equal(state, made.state)
    assert totals == TOTALS


def test_an_island_that_joined_later_is_gathered_after_the_founders(made, folders, tmp_path):
    _, state, _, _ = newest(folders[0])
    guest = stream(made.config, 4, 3)  # replica 4, the second to join; replica 3 is not among the folders
    list(itertools.islice(guest, 3))
    joined = jax.tree.map(lambda x: -x if x.ndim else x, state)
    save(tmp_path / "lima", made.config, 12, joined, [guest.get_state()])
    gathered([tmp_path / "lima", *folders], tmp_path / "run")
    _, whole, positions, _ = newest(tmp_path / "run")
    np.testing.assert_array_equal(whole.params["embed"][3:], joined.params["embed"])
    np.testing.assert_array_equal(whole.params["embed"][:3], made.state.params["embed"])
    expected = [int(token) for batch in itertools.islice(guest, 3) for token in batch["input_ids"].ravel()]
    one = stream(made.config, 3, 4)
    one.set_state(positions[3])
    assert [int(token) for batch in itertools.islice(one, 3) for token in batch["input_ids"].ravel()] == expected


def test_islands_are_gathered_at_the_newest_step_that_all_have(made, folders, tmp_path):
    for folder, steps in zip(folders, ((14, 16), (16, 18), (16, 20)), strict=True):
        _, state, positions, _ = newest(folder)
        for step in steps:
            save(folder, replace(made.config, keep_checkpoints=9), step, state, positions)
    lines = gathered(folders, tmp_path / "run")
    assert newest(tmp_path / "run")[0] == 16
    assert lines[0] == f"{folders[0]}: replica 0 of 3 after step 16"


def test_gathering_without_a_common_step_reports_the_steps_of_each_island(made, folders, tmp_path):
    _, state, positions, _ = newest(folders[1])
    shutil.rmtree(folders[1] / "checkpoints")
    save(folders[1], made.config, 14, state, positions)
    with pytest.raises(UserError, match=r"no step of which all folders .*paris 12; .*berlin 14; .*rome 12\): let the"):
        gathered(folders, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_gathering_some_islands_keeps_their_weights_and_unread_data(made, folders, tmp_path):
    lines = gathered([folders[2], folders[0]], tmp_path / "run")
    assert "without replica 1: its share of the data is not read before the next epoch" in lines
    _, state, positions, totals = newest(tmp_path / "run")
    assert_equal(state, jax.tree.map(lambda x: x[np.array([0, 2])] if x.ndim else x, made.state))
    assert totals.tokens == 2000
    for replica, (position, former) in enumerate(zip(positions, (0, 2), strict=True)):
        one = stream(made.config, replica, 2)
        one.set_state(position)
        for batch, expected in zip(one, made.batches[former], strict=False):
            jax.tree.map(np.testing.assert_array_equal, batch, expected)
        one.close()


def make_inconsistent(folders: list[Path], what: str) -> list[Path]:
    """Make the folders inconsistent; return those to gather."""
    _, state, (position,), _ = newest(folders[1])
    if what == "alone":
        return folders[:1]
    if what == "twice":
        shutil.copytree(folders[0], folders[0].with_name("copy"))
        return [*folders, folders[0].with_name("copy")]
    if what == "model":
        config = load_saved(folders[1])
        save_config(replace(config, inner=replace(config.inner, lr=0.5)), folders[1])
        return folders
    shutil.rmtree(folders[1] / "checkpoints")
    if what == "data":
        position = position | {"source": position["source"] | {"files": 99}}
    if what == "rounds":
        state = jax.tree.map(lambda x: x if x.ndim else np.asarray(8, x.dtype), state)
    if what == "division":
        position = position | {"num_replicas": 4}
    save(folders[1], load_saved(folders[1]), 12, state, [position])
    return folders


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("alone", "names one island"),
        ("twice", "copy and .*paris are both of replica 0"),
        ("model", "berlin and .*paris do not belong together, their inner differs"),
        ("data", "data of .*berlin and .*paris .*'files': 99.*give folders of one run"),
        ("division", "data of .*berlin and .*paris .*num_replicas 4 and 3"),
        ("rounds", r"different outer steps behind them \(7, 8, 7\)"),
    ],
)
def test_inconsistent_folders_are_refused_and_nothing_is_written(folders, tmp_path, what, line):
    with pytest.raises(UserError, match=line):
        gathered(make_inconsistent(folders, what), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_gathering_refuses_a_run_in_place_of_an_island(made, folders, tmp_path):
    with pytest.raises(UserError, match=r"run holds 3 replicas and is no island's"):
        gathered([made.folder / "run", folders[1]], tmp_path / "run")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("num_replicas=2", "num_replicas=2 and the roster of test has 3 islands"),
        ("outer.delay=3", "outer.delay=3: .* only a run without a delay can be split"),
        ("model.num_layers=2", "holds a checkpoint with model.num_layers=1"),
    ],
)
def test_incompatible_settings_of_a_scatter_are_refused_before_anything_is_written(made, override, line):
    with pytest.raises(UserError, match=line):
        made.scatter(f"--config.{override}", out="others")
    assert not (made.folder / "others").exists()


def test_scattering_overwrites_no_folder(made):
    with pytest.raises(UserError, match="already holds something"):
        made.scatter()


def test_scattering_merges_the_replicas_of_a_larger_run(tmp_path, config):
    six = replace(config, num_replicas=6)
    state, positions = random_state(six), [stream(six, i, 6).get_state() for i in range(6)]
    run = Run(tmp_path, config)
    shutil.rmtree(tmp_path / "run")
    save(tmp_path / "run", six, 12, state, positions)
    folders = run.scatter("--config.num_replicas=3", "--config.elastic=merge")
    embed = np.asarray(newest(folders[1])[1].params["embed"][0])
    np.testing.assert_allclose(embed, (state.params["embed"][1] + state.params["embed"][4]) / 2, rtol=1e-6)


def member(name: str, *names: str) -> Membership:
    return Membership(Roster("test", tuple(Island(name, Address("127.0.0.1", 1)) for name in names)), name, None)


def test_an_island_in_a_longer_roster_resumes_with_the_rest_of_its_data_share(made, folders):
    config = replace(made.config, num_replicas=4)
    with Checkpointer(folders[1], config, read_only=True) as checkpoints:
        position = member("berlin", *NAMES, "oslo").data_position(checkpoints, 12)
    one = stream(config, 1, 4)
    one.set_state(position)
    for batch, expected in zip(one, made.batches[1], strict=False):
        jax.tree.map(np.testing.assert_array_equal, batch, expected)
    one.close()


@pytest.mark.parametrize(
    ("workdir", "line"),
    [("islands/rome", "step 12 is of replica 2, and berlin is replica 1"), ("run", "step 12 is of all 3 replicas")],
)
def test_an_island_refuses_to_resume_from_a_checkpoint_that_is_not_its_own(made, workdir, line):
    with (
        Checkpointer(made.folder / workdir, made.config, read_only=True) as checkpoints,
        pytest.raises(UserError, match=line),
    ):
        member("berlin", *NAMES).data_position(checkpoints, 12)


def test_an_island_that_joined_later_resumes_by_its_replica_number(made, tmp_path):
    position = stream(made.config, 3, 3).get_state()
    save(tmp_path / "oslo", made.config, 12, jax.tree.map(lambda x: x[:1] if x.ndim else x, made.state), [position])
    entries = [Entry(3, "oslo", "127.0.0.1:9", 7, OPEN, 0, 1), Entry(4, "lima", "127.0.0.1:8", 9, OPEN, 0, 1)]
    roster = Roster("test", tuple(Island(name, Address("127.0.0.1", 1)) for name in NAMES))
    with Checkpointer(tmp_path / "oslo", made.config, read_only=True) as checkpoints:
        oslo, lima = (
            Membership(roster, name, None, members=Members(NAMES, lambda entry: True, entries))
            for name in ("oslo", "lima")
        )
        assert oslo.data_position(checkpoints, 12) == position
        with pytest.raises(UserError, match="step 12 is of replica 3, and lima is replica 4"):
            lima.data_position(checkpoints, 12)


def next_documents(config: TrainConfig, replica: int, num_replicas: int, position: dict[str, Any]) -> list[str]:
    """Return the lines of a stream's next 12 batches, without the first and last ones, which may be cut."""
    one = stream(config, replica, num_replicas)
    one.set_state(position)
    text = b"".join(
        bytes(int(token) for token in batch["input_ids"].reshape(-1) if token < 256)
        for batch in itertools.islice(one, 12)
    )
    one.close()
    return text.decode(errors="replace").splitlines()[1:-1]


def test_replicas_copied_from_one_island_divide_the_rest_of_its_data_share(made, folders):
    config = replace(made.config, elastic="copy")
    with Checkpointer(folders[1], config, read_only=True) as checkpoints:
        divided = elastic.data_positions(checkpoints.open(12), 3)
    assert [(one["replica"], one["num_replicas"]) for one in divided] == [(i, 3) for i in range(3)]
    read = [set(next_documents(config, i, 3, position)) for i, position in enumerate(divided)]
    assert all(read) and not any(one & other for one, other in itertools.combinations(read, 2))
