"""Island of several real processes that shard its replica; its first process exchanges with the other islands."""

import asyncio
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from noloco_jax.islands.commands import Run, open_run
from noloco_jax.islands.merge import Merged, mean_of, of_live_islands
from noloco_jax.islands.transport import Dialler
from support import processes
from support.archipelago import Archipelago

pytestmark = pytest.mark.timeout(900)

NAMES: tuple[str, ...] = ("berlin", "paris")  # paris is two processes
OWN = {"paris": ["--config.mesh.fsdp=2"]}
SMALL = ["--config.num_replicas=2", "--config.model.num_layers=1"]


async def merged(run: Run) -> Merged:
    """Return the mean of the weights of the islands that train."""
    dialler = Dialler(run.name, run.credentials, run.roster)
    try:
        return await mean_of(await of_live_islands(run, dialler, ask_seconds=10, seconds=60), print)
    finally:
        await dialler.close()


def trained(config: Path, folder: Path, *arguments: str, size: int, devices: int) -> Archipelago:
    """Train both islands to the end, waiting for each exchange; return them.

    Paris has `size` processes of so many devices, berlin one of one, whose programs the second run has from the cache.
    """
    every = [f"--config={config}", *SMALL, *arguments]
    options = {"sizes": {"paris": size}, "own": OWN, "variables": {"paris": processes.environment(config, devices)}}
    with Archipelago(folder, NAMES, every, processes.environment(config), waits=True, **options) as islands:
        islands.train()
    return islands


def test_an_island_of_two_processes_trains_bitwise_like_one_of_two_devices(config, tmp_path):
    """Corrections cover two fragments; at the end both islands are merged into their mean."""
    arguments = ["--config.num_steps=12", "--config.checkpoint_every=12", "--config.outer.fragments=2", "--linger=100"]
    arguments += ["--config.outer.final_merge=True", "--config.outer.wire=modulo4"]
    over_two = trained(config, tmp_path / "over_two", *arguments, size=2, devices=1)
    alone = trained(config, tmp_path / "alone", *arguments, size=1, devices=2)
    for name in NAMES:
        mine, theirs = processes.weights(over_two.workdir(name)), processes.weights(alone.workdir(name))
        for path in theirs:
            np.testing.assert_array_equal(mine[path], theirs[path], err_msg=f"{name} {path}")
        outcomes = [[one["outcome"] for one in islands.lines(name, "exchange")] for islands in (over_two, alone)]
        assert outcomes == [["met"] * 6] * 2
        assert "merged model: the mean of 2 of 2 islands" in over_two.said(name)
    losses = [[line["loss"] for line in islands.lines("paris", "train")] for islands in (over_two, alone)]
    assert losses[0] == losses[1] and len(losses[0]) == 12


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="sends signals as Linux has them")
def test_a_killed_process_ends_only_its_island_which_resumes_and_serves_as_donor(config, tmp_path):
    arguments = [f"--config={config}", *SMALL, "--config.num_steps=100000", "--config.eval_every=100000"]
    arguments += ["--config.checkpoint_every=20", "--pace=time"]
    environment, both = processes.environment(config), ("paris", "paris.1")
    with Archipelago(tmp_path, NAMES, arguments, environment, 0.1, sizes={"paris": 2}, own=OWN) as islands:
        for name in NAMES:
            islands.start(name)
        saved = islands.workdir("paris") / "checkpoints"
        islands.until(lambda: islands.has_met("paris") and any(saved.glob("*0")), *islands.running)

        islands.kill("paris.1")
        reached = islands.step("berlin")
        islands.until(lambda: islands.running["paris"].poll() is not None, "berlin")
        assert islands.running["paris"].returncode == 1
        assert "another process has ended" in islands.said("paris")
        islands.until(lambda: islands.step("berlin") > reached + 12, "berlin")  # three rounds

        back = islands.last_round("berlin")
        islands.start("paris")
        islands.until(lambda: islands.has_met("paris", after=back), "berlin", *both)
        assert "resuming from the checkpoint of step" in islands.said("paris")
        assert "training continues from another island's weights" in islands.said("paris")

        islands.kill("berlin")
        shutil.rmtree(islands.workdir("berlin"))
        islands.start("berlin")
        islands.until(lambda: islands.has_met("berlin", after=back), "berlin", *both)
        assert "these weights came from paris" in islands.said("berlin")
        assert asyncio.run(merged(open_run(islands.roster, islands.keys))).rounds.keys() == {*NAMES}

        islands.signal("paris.1", signal.SIGTERM)
        islands.signal("berlin", signal.SIGTERM)
        assert [islands.running[name].wait(processes.PATIENCE) for name in ("berlin", *both)] == [75] * 3
        assert "met berlin" not in islands.said("paris.1")
