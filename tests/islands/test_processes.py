"""Limits on the harm that a member does to others, with real processes over TLS; `World` tests them in virtual time."""

import json
import shutil
import signal

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
        islands.until(lambda: all(len(islands.lines(name, "train")) >= 120 for name in NAMES))
        assert sum(outcomes(islands, "rome")) >= 4  # its reports were received
        for name in ("berlin", "paris"):
            steps = [line["step"] for line in islands.lines(name, "train")]
            assert (steps[-1] - steps[20]) / (len(steps) - 21) <= 1.2 * MOST_TIMED, name


def test_islands_all_killed_before_a_checkpoint_begin_anew_without_one_of_them(config, tmp_path):
    arguments = [f"--config={config}", "--config.num_replicas=3", *ARGUMENTS]
    altered = dict.fromkeys(NAMES, "begins anew soon")
    with Archipelago(tmp_path, NAMES, arguments, processes.environment(config), 0.1, altered) as islands:
        for name in NAMES:
            islands.start(name)
        islands.until(lambda: all(islands.step(name) >= 6 for name in NAMES))
        for name in NAMES:
            islands.kill(name)
        for name in SLOWER:
            islands.start(name)
        other = {"paris": "rome", "rome": "paris"}

        def has_begun_anew(name: str) -> bool:
            _, anew, since = islands.said(name).partition(f"and {FASTEST} did not answer: {name} begins anew")
            return bool(anew) and f"met {other[name]}" in since

        islands.until(lambda: all(has_begun_anew(name) for name in SLOWER), *SLOWER)


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


def test_an_island_with_a_lost_workdir_and_clock_set_back_meets_the_others_again(config, tmp_path):
    arguments = [f"--config={config}", "--config.num_replicas=3", *ARGUMENTS]
    with Archipelago(tmp_path, NAMES, arguments, processes.environment(config), 0.1) as islands:
        for name in NAMES:
            islands.start(name)
        islands.until(lambda: all(any(outcomes(islands, name)) for name in NAMES))
        islands.kill("rome")
        shutil.rmtree(islands.workdir("rome"))
        islands.altered["rome"] = "has its clock set back"
        islands.start("rome")
        islands.until(lambda: sum(outcomes(islands, "rome")) >= 3)
        assert "peers know a later rome" in islands.said("rome")


def test_a_second_message_of_an_exchange_is_refused_and_training_continues(config, tmp_path):
    """Regression test: the victim accepted the first message and added the second one, of NaN, to its weights."""
    arguments = [f"--config={config}", "--config.num_replicas=3", *ARGUMENTS]
    altered = {"rome": "sends twice"}
    with Archipelago(tmp_path, NAMES, arguments, processes.environment(config), 0.1, altered) as islands:
        for name in NAMES:
            islands.start(name)
        honest = ("berlin", "paris")
        islands.until(lambda: all("a second one" in islands.said(name) for name in honest))
        reached = {name: islands.step(name) for name in honest}
        islands.until(lambda: all(islands.step(name) >= reached[name] + 40 for name in honest))
        for name in honest:
            assert any(
                "met " + ("paris" if name == "berlin" else "berlin") in line for line in islands.said(name).splitlines()
            )
            assert all(np.isfinite(line["loss"]).all() for line in islands.lines(name, "train"))


def test_keys_are_renewed_during_training_and_the_replaced_keys_are_refused(config, tmp_path):
    arguments = [f"--config={config}", "--config.num_replicas=3", *ARGUMENTS]
    with Archipelago(tmp_path, NAMES, arguments, processes.environment(config), 0.1) as islands:
        for name in NAMES:
            islands.start(name)
        islands.until(lambda: all(any(outcomes(islands, name)) for name in NAMES))
        replaced = max(newest_seen(islands, by, "rome") for by in NAMES[:2])
        shutil.copytree(islands.keys / "rome", tmp_path / "old")
        islands.make_keys("--replace=rome")
        islands.until(lambda: "rome has read new keys" in islands.said("rome"))
        since = islands.last_round("rome") + 1
        islands.until(lambda: sum(outcomes(islands, "rome", since)) >= 4)
        islands.until(lambda: all(newest_seen(islands, by, "rome") > replaced for by in NAMES[:2]))
        assert not any("another has replaced" in islands.said(by) for by in NAMES[:2])
        islands.kill("rome")
        shutil.rmtree(islands.keys / "rome")
        shutil.copytree(tmp_path / "old", islands.keys / "rome")
        islands.start("rome")
        islands.until(lambda: "a certificate of rome that another has replaced" in islands.said("berlin"))
        back = islands.last_round("berlin") + 1
        islands.until(lambda: islands.last_round("berlin") >= back + 6, *NAMES[:2])
        later = [line for line in islands.lines("berlin", "exchange") if line["round"] >= back]
        assert all(line["outcome"] == "alone" for line in later if line["partner"] == "rome")
        assert any(line["outcome"] != "alone" for line in later)
