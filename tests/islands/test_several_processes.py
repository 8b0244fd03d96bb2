"""Islands in real processes, one of which shards its replica over two: bitwise training, and kills."""

import asyncio
import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from noloco_jax.islands.ask import RosterAndKeys, open_run
from noloco_jax.islands.exchange import SILENT_SECONDS
from noloco_jax.islands.merge import Merged, mean_of, of_live_islands
from noloco_jax.islands.transport import Dialler
from support import processes
from support.archipelago import Archipelago, Site

pytestmark = pytest.mark.timeout(900)

SHARDED = ["--config.mesh.fsdp=2"]
SMALL = "--config.model.num_layers=1"


async def merged(run: RosterAndKeys, folder: Path) -> Merged:
    """Return the mean of the weights of the islands that train."""
    dialler = Dialler(run.name, run.credentials, run.roster)
    try:
        return await mean_of(await of_live_islands(run, dialler, ask_seconds=10, seconds=60, folder=folder), print)
    finally:
        await dialler.close()


def test_an_island_of_two_processes_trains_bitwise_like_one_of_two_devices(config, tmp_path):
    """Corrections cover two fragments; at the end both islands are merged into their mean."""
    arguments = ["--config.num_replicas=2", SMALL, "--config.num_steps=12", "--config.checkpoint_every=12"]
    arguments += ["--config.outer.fragments=2", "--config.outer.wire=modulo4"]
    arguments += ["--config.outer.final_merge=True", "--linger=100"]
    runs = []
    for paris in (Site(number=2, arguments=SHARDED), Site(devices=2, arguments=SHARDED)):
        sites = {"berlin": Site(), "paris": paris}
        with Archipelago(tmp_path / str(paris.number), sites, config, arguments, "waiting") as islands:
            islands.train()
        runs.append(islands)
    for name in ("berlin", "paris"):
        mine, theirs = (processes.weights(islands.workdir(name)) for islands in runs)
        for path in theirs:
            np.testing.assert_array_equal(mine[path], theirs[path], err_msg=f"{name} {path}")
        outcomes = [[one["outcome"] for one in islands.lines(name, "exchange")] for islands in runs]
        assert outcomes == [["met"] * 6] * 2
        assert "merged model: the mean of 2 of 2 islands" in runs[0].said(name)
    losses = [[line["loss"] for line in islands.lines("paris", "train")] for islands in runs]
    assert losses[0] == losses[1] and len(losses[0]) == 12


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="sends signals as Linux has them")
def test_killed_and_stopped_islands_cost_the_others_no_round_and_rejoin(config, tmp_path):
    """A kill of one process of paris, a stop of rome, and a kill of berlin that loses its workdir."""
    arguments = ["--config.num_replicas=3", SMALL, "--config.num_steps=100000", "--config.eval_every=100000"]
    arguments += ["--config.checkpoint_every=20", "--pace=time"]
    sites = {"berlin": Site(), "paris": Site(number=2, arguments=SHARDED), "rome": Site()}
    with Archipelago(tmp_path, sites, config, arguments, "paced:0.1") as islands:
        for name in sites:
            islands.start(name)
        saved = islands.workdir("paris") / "checkpoints"
        islands.until(lambda: all(map(islands.has_met, sites)) and any(saved.glob("*0")))

        islands.kill("paris.1")
        islands.signal("rome", signal.SIGSTOP)
        first = max(map(islands.last_round, sites)) + 1
        islands.until(lambda: islands.running["paris"].poll() is not None, "berlin")
        assert islands.running["paris"].returncode == 1
        assert "another process has ended" in islands.said("paris")
        islands.until(lambda: islands.last_round("berlin") > first + 8, "berlin")

        back = islands.last_round("berlin")
        islands.signal("rome", signal.SIGCONT)
        islands.start("paris")
        islands.until(lambda: islands.has_met("paris", after=back) and islands.has_met("rome", after=back))
        assert "resuming from the checkpoint of step" in islands.said("paris")
        assert "training continues from another island's weights" in islands.said("paris")
        assert_rounds_alone(islands.workdir("berlin") / "metrics.jsonl", first, back)

        islands.kill("berlin")
        shutil.rmtree(islands.workdir("berlin"))
        islands.start("berlin")
        islands.until(lambda: islands.has_met("berlin", after=back))
        assert "these weights came from " in islands.said("berlin")
        assert asyncio.run(merged(open_run(islands.roster, islands.keys), tmp_path)).rounds.keys() == {*sites}

        for name in ("berlin", "paris.1", "rome"):
            islands.signal(name, signal.SIGTERM)
        assert {process.wait(processes.PATIENCE) for process in islands.running.values()} == {75}
        assert "exchanged with berlin" not in islands.said("paris.1")


def assert_rounds_alone(metrics: Path, first: int, last: int) -> None:
    """Check that an island ended each of these rounds, and waited for none of the absent islands."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    ends = [line for line in lines if line["kind"] == "train" and first <= line.get("round", -1) <= last]
    assert [line["round"] for line in ends] == [*range(first, last + 1)]
    # One absent island that is waited for would take 15 s.
    assert sum(line["outer_step_seconds"] for line in ends) < SILENT_SECONDS
    alone = {line["partner"] for line in lines if line["kind"] == "exchange" and line["outcome"] == "alone"}
    assert alone >= {"paris", "rome"}
