"""What one member or one machine may do to others, with real processes over TLS; `World` has each in virtual time."""

import signal
from collections.abc import Callable

import pytest

from noloco_jax.islands.protocol.speeds import MOST_TIMED
from support import processes
from support.archipelago import Archipelago

pytestmark = pytest.mark.timeout(600)

NAMES: tuple[str, ...] = ("berlin", "paris", "rome")
FASTEST, *SLOWER = NAMES
ARGUMENTS = ["--config.num_steps=100000", "--config.checkpoint_every=100000", "--config.eval_every=100000"]


def outcomes(islands: Archipelago, name: str, first: int = 0) -> list[bool]:
    """Return whether each message of a round from `first` on, which had a partner, was exchanged."""
    lines = (line for line in islands.lines(name, "exchange") if line["partner"] and line["round"] >= first)
    return [line["outcome"] != "alone" for line in lines]


def until(islands: Archipelago, condition: Callable[[], bool], *names: str) -> None:
    """Waits for a condition while all of these islands run."""
    watched = [islands.running[name] for name in names or NAMES]
    said = [islands.said(name)[-2000:] for name in NAMES if islands.log(name).exists()]
    assert processes.wait_until(condition, watched, 240), "\n".join(said)


def last_round(islands: Archipelago, name: str) -> int:
    return max((line["round"] for line in islands.lines(name, "train") if "round" in line), default=-1)


def test_islands_that_keep_pace_meet_again_after_the_slower_ones_were_stopped_for_rounds(config, tmp_path):
    """At speeds of 1, 2 and 4. Before, the fastest stayed rounds ahead of all others and met nobody."""
    arguments = [f"--config={config}", "--config.num_replicas=3", "--pace=time", *ARGUMENTS]
    seconds = {name: 0.1 * 2**place for place, name in enumerate(NAMES)}
    with Archipelago(tmp_path, NAMES, arguments, processes.environment(config), seconds) as islands:
        for name in NAMES:
            islands.start(name)
        until(islands, lambda: sum(outcomes(islands, FASTEST)) >= 4)
        for name in SLOWER:
            islands.signal(name, signal.SIGSTOP)
        stopped = last_round(islands, FASTEST)
        until(islands, lambda: last_round(islands, FASTEST) >= stopped + 8, FASTEST)
        for name in SLOWER:
            islands.signal(name, signal.SIGCONT)
        back = last_round(islands, FASTEST)
        until(islands, lambda: len(outcomes(islands, FASTEST, back + 10)) >= 12)
        met = outcomes(islands, FASTEST, back + 10)
        assert sum(met) >= 0.6 * len(met), islands.said(FASTEST)[-3000:]


def test_a_member_whose_speeds_are_false_moves_the_others_through_the_schedule_within_the_bound(config, tmp_path):
    """Before, two islands ran 30 times as fast through their schedule, for ever; and with bounds by the rounds that
    the liar ends alone, 8 times and more, as it kept pace with those that believed it.
    """
    arguments = [f"--config={config}", "--config.num_replicas=3", "--pace=time", *ARGUMENTS]
    how = {"rome": "lies of speed"}
    with Archipelago(tmp_path, NAMES, arguments, processes.environment(config), 0.1, how) as islands:
        for name in NAMES:
            islands.start(name)
        until(islands, lambda: all(len(islands.lines(name, "train")) >= 120 for name in NAMES))
        assert sum(outcomes(islands, "rome")) >= 4  # it was heard
        for name in ("berlin", "paris"):
            steps = [line["step"] for line in islands.lines(name, "train")]
            assert (steps[-1] - steps[20]) / (len(steps) - 21) <= 1.2 * MOST_TIMED, name


def test_islands_that_were_all_killed_before_their_first_checkpoint_begin_anew_without_one_of_them(config, tmp_path):
    arguments = [f"--config={config}", "--config.num_replicas=3", *ARGUMENTS]
    how = dict.fromkeys(NAMES, "begins anew soon")
    with Archipelago(tmp_path, NAMES, arguments, processes.environment(config), 0.1, how) as islands:
        for name in NAMES:
            islands.start(name)
        until(islands, lambda: all(islands.step(name) >= 6 for name in NAMES))
        for name in NAMES:
            islands.kill(name)
        for name in SLOWER:
            islands.start(name)
        other = {"paris": "rome", "rome": "paris"}

        def has_begun_anew(name: str) -> bool:
            _, anew, since = islands.said(name).partition(f"and {FASTEST} did not answer: {name} begins anew")
            return bool(anew) and f"met {other[name]}" in since

        until(islands, lambda: all(has_begun_anew(name) for name in SLOWER), *SLOWER)
