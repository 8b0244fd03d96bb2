"""Killed and stopped island processes: the others lose no step and do not wait for the absent ones."""

import json
import signal
from pathlib import Path

import pytest

from noloco_jax.islands.exchange import SILENT_SECONDS
from noloco_jax.islands.interfaces import PATIENCE
from support import processes
from support.archipelago import Archipelago

pytestmark = pytest.mark.timeout(900)

NAMES = ("berlin", "paris", "rome")
ROUND = 4  # steps


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="sends Linux signals")
def test_killed_and_stopped_islands_cost_the_others_no_step_and_rejoin(config, tmp_path):
    arguments = [f"--config={config}", "--config.num_steps=100000", "--config.checkpoint_every=100000"]
    arguments += ["--config.eval_every=100000", "--config.num_replicas=3"]
    with Archipelago(tmp_path, NAMES, arguments, processes.environment(config), seconds_per_step=0.1) as islands:
        for name in NAMES:
            islands.start(name)
        islands.until(lambda: all(islands.has_met(name) for name in NAMES))
        islands.kill("rome")
        killed = max(map(islands.last_round, NAMES))
        islands.until(lambda: min(map(islands.last_round, NAMES[:2])) > killed + 8, *NAMES[:2])
        islands.signal("paris", signal.SIGSTOP)
        stopped = max(map(islands.last_round, NAMES))
        islands.until(lambda: islands.last_round("berlin") > stopped + 8, "berlin")
        islands.signal("paris", signal.SIGCONT)
        islands.start("rome")
        back = islands.last_round("berlin")
        islands.until(lambda: islands.has_met("rome", after=back) and islands.has_met("paris", after=back))
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
        # Waiting for one absent island would have taken 15 s.
        assert sum(line.get("outer_step_seconds", 0.0) for line in away) < SILENT_SECONDS
        alone = {one["partner"] for one in islands.lines("berlin", "exchange") if one["outcome"] == "alone"}
        assert alone >= {"paris", "rome"}
        assert "training continues from another island's weights" in islands.said("rome")
        one_sided_rounds = {
            one["round"] for name in NAMES for one in islands.lines(name, "exchange") if one["one_sided"]
        }
        interrupted_rounds = {at - late for at in (killed + 1, stopped + 1) for late in range(PATIENCE + 2)}
        assert one_sided_rounds <= interrupted_rounds  # a kill or stop may fall between an exchange's last messages
