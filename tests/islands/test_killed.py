"""Real processes that are killed and stopped: the others train on, without a step lost or a wait for who is away."""

import json
import signal
from pathlib import Path

import pytest

from noloco_jax.islands.protocol.context import Settings
from support import processes
from support.archipelago import Archipelago

pytestmark = pytest.mark.timeout(900)

NAMES = ("berlin", "paris", "rome")
ROUND = 4  # steps


def round_reached(islands: Archipelago, names: tuple[str, ...], round: int) -> None:
    """Waits until these islands have ended a round."""
    watched = [islands.running[name] for name in names]
    assert processes.wait_until(
        lambda: all(islands.step(name) > ROUND * (round + 1) for name in names), watched, processes.PATIENCE
    ), "\n".join(islands.said(name)[-2000:] for name in names)


def newest(islands: Archipelago, *names: str) -> int:
    """The last round that one of them has ended."""
    return max(islands.step(name) for name in names) // ROUND - 1


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="sends signals as Linux has them")
def test_who_is_killed_or_stopped_costs_the_others_no_step_and_comes_back(config, tmp_path):
    arguments = [f"--config={config}", "--config.num_steps=4000", "--config.checkpoint_every=4000"]
    arguments += ["--config.eval_every=4000", "--config.num_replicas=3"]
    with Archipelago(tmp_path, NAMES, arguments, processes.environment(config), seconds_per_step=0.1) as islands:
        for name in NAMES:
            islands.start(name)
        processes.wait_until(
            lambda: all(any(one["outcome"] != "alone" for one in islands.lines(name, "exchange")) for name in NAMES),
            list(islands.running.values()),
            processes.PATIENCE,
        )
        islands.kill("rome")
        killed = newest(islands, *NAMES)
        round_reached(islands, ("berlin", "paris"), killed + 8)
        islands.signal("paris", signal.SIGSTOP)
        stopped = newest(islands, *NAMES)
        round_reached(islands, ("berlin",), stopped + 8)
        islands.signal("paris", signal.SIGCONT)
        islands.start("rome")
        back = newest(islands, "berlin")

        def met_again(name: str) -> bool:
            return any(one["outcome"] == "met" and one["round"] > back for one in islands.lines(name, "exchange"))

        assert processes.wait_until(
            lambda: met_again("rome") and met_again("paris"), list(islands.running.values()), processes.PATIENCE
        ), islands.said("rome")[-3000:]
        for name in NAMES:
            islands.signal(name, signal.SIGTERM)
        assert [islands.running[name].wait(processes.PATIENCE) for name in NAMES] == [75] * len(NAMES)

        lines = [json.loads(line) for line in (islands.workdir("berlin") / "metrics.jsonl").read_text().splitlines()]
        # With both of the others away: before, it may itself have been late, and have taken another's weights.
        first, last = ROUND * (stopped + 1) + 1, ROUND * (back + 1)
        steps = [line for line in lines if line["kind"] == "train" and first <= line["step"] <= last]
        assert [line["step"] for line in steps] == list(range(first, last + 1))
        away = [line for line in steps if "round" in line]
        assert [line["round"] for line in away] == list(range(stopped + 1, back + 1))
        # A wait for any of those who were away would have taken an answer's deadline.
        assert sum(line["outer_step_seconds"] for line in away) < Settings().answer_seconds
        alone = {one["partner"] for one in islands.lines("berlin", "exchange") if one["outcome"] == "alone"}
        assert alone >= {"paris", "rome"}
        assert "training continues from another island's weights" in islands.said("rome")
        doubted = {one["round"] for name in NAMES for one in islands.lines(name, "exchange") if one["one_sided"]}
        under_way = {at - late for at in (killed + 1, stopped + 1) for late in range(Settings().patience + 2)}
        assert doubted <= under_way  # when an island was killed or stopped, perhaps between two of its last words


def test_islands_go_back_to_a_step_together_and_train_on_from_it(config, tmp_path):
    names = ("berlin", "paris")
    arguments = [f"--config={config}", "--config.num_replicas=2", "--config.eval_every=100"]

    def trained(num_steps: int, *more: str) -> Archipelago:
        every = [*arguments, f"--config.num_steps={num_steps}", *more]
        with Archipelago(tmp_path, names, every, processes.environment(config), seconds_per_step=0.1) as islands:
            for name in names:
                islands.start(name)
            ended = [islands.running[name].wait(processes.PATIENCE) for name in names]
            assert ended == [0, 0], [islands.said(name)[-2000:] for name in names]
        return islands

    trained(12)
    islands = trained(16, "--from_step=8")
    for name in names:
        assert "resuming from the checkpoint of step 8 " in islands.said(name)
        aside = islands.workdir(name) / "checkpoints_set_aside"
        assert [path.name for path in aside.iterdir()] == ["12"]
        assert islands.step(name) == 16
        assert any(line["outcome"] == "met" and line["round"] >= 2 for line in islands.lines(name, "exchange"))
