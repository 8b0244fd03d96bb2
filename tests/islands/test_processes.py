"""Limits on the harm that a member does to others, with real processes over TLS; `World` tests them in virtual time."""

import json
import shutil
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from noloco_jax.islands.protocol.speeds import MOST_TIMED
from support import processes
from support.archipelago import Archipelago

pytestmark = pytest.mark.timeout(600)

NAMES: tuple[str, ...] = ("berlin", "paris", "rome")
FASTEST, *SLOWER = NAMES
ARGUMENTS = ["--config.num_steps=100000", "--config.checkpoint_every=100000", "--config.eval_every=100000"]


def outcomes(islands: Archipelago, name: str, first: int = 0) -> list[bool]:
    """Return, for each message with a partner from round `first` on, whether it was exchanged."""
    lines = (line for line in islands.lines(name, "exchange") if line["partner"] and line["round"] >= first)
    return [line["outcome"] != "alone" for line in lines]


def have_met(islands: Archipelago, by: str, of: str, after: int) -> bool:
    """Return whether island `by` has exchanged with island `of` in a round after `after`."""
    lines = (line for line in islands.lines(by, "exchange") if line["partner"] == of)
    return any(line["outcome"] != "alone" and line["round"] > after for line in lines)


def newest_seen(islands: Archipelago, by: str, of: str) -> int:
    """Return when the newest certificate of island `of` that island `by` has seen was made, in ms; 0: none was seen."""
    path = islands.keys / by / "newest.json"
    return json.loads(path.read_bytes()).get(of, 0) if path.exists() else 0


def test_islands_that_keep_pace_meet_again_after_the_slower_ones_were_paused(config, tmp_path):
    """Speeds are 4, 2 and 1. Regression test: the fastest stayed rounds ahead of the others and met none of them."""
    arguments = [f"--config={config}", "--config.num_replicas=3", "--pace=time", *ARGUMENTS]
    seconds = {name: 0.1 * 2**place for place, name in enumerate(NAMES)}
    with Archipelago(tmp_path, NAMES, arguments, processes.environment(config), seconds) as islands:
        for name in NAMES:
            islands.start(name)
        islands.until(lambda: sum(outcomes(islands, FASTEST)) >= 4)
        for name in SLOWER:
            islands.signal(name, signal.SIGSTOP)
        stopped = islands.last_round(FASTEST)
        islands.until(lambda: islands.last_round(FASTEST) >= stopped + 8, FASTEST)
        for name in SLOWER:
            islands.signal(name, signal.SIGCONT)
        back = islands.last_round(FASTEST)
        islands.until(lambda: len(outcomes(islands, FASTEST, back + 10)) >= 12)
        met = outcomes(islands, FASTEST, back + 10)
        assert sum(met) >= len(met) / 3, islands.said(FASTEST)[-3000:]  # none before the fix


def test_a_member_with_false_speeds_accelerates_the_others_only_within_the_bound(config, tmp_path):
    """Regression test: two islands passed through their schedule 30 times as fast, without an end.

    With a bound by the liar's rounds alone it was 8 times and more, as the liar kept pace with those that believed it.
    """
    arguments = [f"--config={config}", "--config.num_replicas=3", "--pace=time", *ARGUMENTS]
    altered = {"rome": "lies of speed"}
    with Archipelago(tmp_path, NAMES, arguments, processes.environment(config), 0.1, altered) as islands:
        for name in NAMES:
            islands.start(name)
        islands.until(lambda: all(len(islands.lines(name, "train")) >= 80 for name in NAMES))
        assert sum(outcomes(islands, "rome")) >= 4  # its reports were received
        for name in ("berlin", "paris"):
            steps = [line["step"] for line in islands.lines(name, "train")]
            assert (steps[-1] - steps[20]) / (len(steps) - 21) <= 1.2 * MOST_TIMED, name


def test_a_member_that_flips_signs_is_left_out_and_the_others_keep_learning(config, tmp_path):
    arguments = [f"--config={config}", "--config.num_replicas=3", *ARGUMENTS]
    altered = {"rome": "flips signs"}
    with Archipelago(tmp_path, NAMES, arguments, processes.environment(config), 0.1, altered) as islands:
        for name in NAMES:
            islands.start(name)
        honest = ("berlin", "paris")

        def has_left_out(name: str) -> bool:
            return f"rome is far from {name}'s weights and came no closer" in islands.said(name)

        islands.until(lambda: all(has_left_out(name) for name in honest))
        left_out = {name: islands.step(name) for name in honest}
        islands.until(lambda: all(islands.step(name) >= left_out[name] + 40 for name in honest))
        for name in honest:
            losses = [line["loss"] for line in islands.lines(name, "train")]
            assert max(losses[-20:]) < losses[0]
            assert not any(f"alone, without {other}" in islands.said(name) for other in honest)


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Iterator[Archipelago]:
    """Yield three islands without checkpoints, each of which has exchanged; several tests in turn disturb them."""
    folder = tmp_path_factory.mktemp("kept")
    config = processes.write_config(folder)
    arguments = [f"--config={config}", "--config.num_replicas=3", *ARGUMENTS]
    with Archipelago(folder / "islands", NAMES, arguments, processes.environment(config), 0.1) as islands:
        for name in NAMES:
            islands.start(name)
        islands.until(lambda: all(any(outcomes(islands, name)) for name in NAMES))
        yield islands


@pytest.fixture
def trio(kept) -> Iterator[Archipelago]:
    """Yield the islands with berlin and paris training; rome, which a test starts as it needs it, does not run."""
    kept.kill("rome")
    for name in NAMES[:2]:
        if kept.running[name].poll() is not None:
            kept.start(name)
    yield kept
    kept.altered.clear()
    kept.kill("rome")


def test_an_island_with_a_lost_workdir_and_clock_set_back_meets_the_others_again(trio):
    shutil.rmtree(trio.workdir("rome"))
    trio.altered["rome"] = "has its clock set back"
    trio.start("rome")
    trio.until(lambda: sum(outcomes(trio, "rome")) >= 3)
    assert "peers know a later rome" in trio.said("rome")


def test_a_second_message_of_an_exchange_is_refused_and_training_continues(trio):
    """Regression test: the victim accepted the first message and added the second one, of NaN, to its weights."""
    trio.altered["rome"] = "sends twice"
    trio.start("rome")
    honest = {"berlin": "paris", "paris": "berlin"}
    trio.until(lambda: all("a second one" in trio.said(name) for name in honest))
    reached = {name: trio.last_round(name) for name in honest}
    trio.until(
        lambda: all(
            have_met(trio, name, other, reached[name]) and trio.last_round(name) >= reached[name] + 6
            for name, other in honest.items()
        )
    )
    for name in honest:
        assert all(np.isfinite(line["loss"]).all() for line in trio.lines(name, "train"))


def test_keys_are_renewed_during_training_and_the_replaced_keys_are_refused(trio, tmp_path):
    before = trio.last_round("berlin")
    trio.start("rome")
    trio.until(lambda: have_met(trio, "berlin", "rome", before))
    replaced = max(newest_seen(trio, by, "rome") for by in NAMES[:2])
    shutil.copytree(trio.keys / "rome", tmp_path / "old")
    trio.make_keys("--replace=rome")
    trio.until(lambda: "rome has read new keys" in trio.said("rome"))
    since = trio.last_round("rome") + 1
    trio.until(lambda: sum(outcomes(trio, "rome", since)) >= 2)
    trio.until(lambda: all(newest_seen(trio, by, "rome") > replaced for by in NAMES[:2]))
    assert not any("another has replaced" in trio.said(by) for by in NAMES[:2])
    trio.kill("rome")
    shutil.copytree(trio.keys / "rome", tmp_path / "new")
    shutil.copytree(tmp_path / "old", trio.keys / "rome", dirs_exist_ok=True)
    trio.start("rome")
    trio.until(lambda: "a certificate of rome that another has replaced" in trio.said("berlin"))
    back = trio.last_round("berlin") + 1
    trio.until(lambda: trio.last_round("berlin") >= back + 6, *NAMES[:2])
    later = [line for line in trio.lines("berlin", "exchange") if line["round"] >= back]
    assert all(line["outcome"] == "alone" for line in later if line["partner"] == "rome")
    assert any(line["outcome"] != "alone" for line in later)
    shutil.copytree(tmp_path / "new", trio.keys / "rome", dirs_exist_ok=True)  # for the tests that follow


def test_islands_all_killed_before_a_checkpoint_begin_anew_without_one_of_them(trio):
    left = {"berlin": "paris", "paris": "berlin"}
    for name in left:
        trio.kill(name)
    for name in left:
        trio.altered[name] = "begins anew soon"
        trio.start(name)

    def has_begun_anew(name: str) -> bool:
        _, anew, since = trio.said(name).partition(f"and rome did not answer: {name} begins anew")
        return bool(anew) and f"met {left[name]}" in since

    trio.until(lambda: all(has_begun_anew(name) for name in left), *left)
