"""Killed and stopped island processes: the others lose no step and do not wait for the absent ones."""

import json
import signal
from pathlib import Path

import pytest

from noloco_jax.islands.protocol.context import Settings
from support import processes
from support.archipelago import INTERVAL, Archipelago

pytestmark = pytest.mark.timeout(900)

NAMES = ("berlin", "paris", "rome")
ROUND = 4  # steps


def wait_for_round(islands: Archipelago, names: tuple[str, ...], round: int) -> None:
    """Wait until the named islands have ended a round."""
    watched = [islands.running[name] for name in names]
    assert processes.wait_until(
        lambda: all(islands.step(name) > ROUND * (round + 1) for name in names), watched, processes.PATIENCE, INTERVAL
    ), "\n".join(islands.said(name)[-2000:] for name in names)


def latest_round(islands: Archipelago, *names: str) -> int:
    """Return the last round that any of the named islands has ended."""
    return max(islands.step(name) for name in names) // ROUND - 1


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="sends Linux signals")
def test_killed_and_stopped_islands_cost_the_others_no_step_and_rejoin(config, tmp_path):
    arguments = [f"--config={config}", "--config.num_steps=4000", "--config.checkpoint_every=4000"]
    arguments += ["--config.eval_every=4000", "--config.num_replicas=3"]
    with Archipelago(tmp_path, NAMES, arguments, processes.environment(config), seconds_per_step=0.1) as islands:
        for name in NAMES:
            islands.start(name)
        processes.wait_until(
            lambda: all(any(one["outcome"] != "alone" for one in islands.lines(name, "exchange")) for name in NAMES),
            list(islands.running.values()),
            processes.PATIENCE,
            INTERVAL,
        )
        islands.kill("rome")
        killed = latest_round(islands, *NAMES)
        wait_for_round(islands, ("berlin", "paris"), killed + 8)
        islands.signal("paris", signal.SIGSTOP)
        stopped = latest_round(islands, *NAMES)
        wait_for_round(islands, ("berlin",), stopped + 8)
        islands.signal("paris", signal.SIGCONT)
        islands.start("rome")
        back = latest_round(islands, "berlin")

        def met_again(name: str) -> bool:
            return any(one["outcome"] == "met" and one["round"] > back for one in islands.lines(name, "exchange"))

        assert processes.wait_until(
            lambda: met_again("rome") and met_again("paris"),
            list(islands.running.values()),
            processes.PATIENCE,
            INTERVAL,
        ), islands.said("rome")[-3000:]
        for name in NAMES:
            islands.signal(name, signal.SIGTERM)
        assert [islands.running[name].wait(processes.PATIENCE) for name in NAMES] == [75] * len(NAMES)

        lines = [json.loads(line) for line in (islands.workdir("berlin") / "metrics.jsonl").read_text().splitlines()]
        # Only the rounds with both others away: earlier, berlin may have been late itself and caught up from another.
        first, last = ROUND * (stopped + 1) + 1, ROUND * (back + 1)
        steps = [line for line in lines if line["kind"] == "train" and first <= line["step"] <= last]
        assert [line["step"] for line in steps] == list(range(first, last + 1))
        away = [line for line in steps if "round" in line]
        assert [line["round"] for line in away] == list(range(stopped + 1, back + 1))
        # Waiting for one absent island would have taken a whole answer timeout.
        assert sum(line["outer_step_seconds"] for line in away) < Settings().answer_seconds
        alone = {one["partner"] for one in islands.lines("berlin", "exchange") if one["outcome"] == "alone"}
        assert alone >= {"paris", "rome"}
        assert "training continues from another island's weights" in islands.said("rome")
        one_sided_rounds = {
            one["round"] for name in NAMES for one in islands.lines(name, "exchange") if one["one_sided"]
        }
        interrupted_rounds = {at - late for at in (killed + 1, stopped + 1) for late in range(Settings().patience + 2)}
        assert one_sided_rounds <= interrupted_rounds  # a kill or stop may fall between an exchange's last messages
