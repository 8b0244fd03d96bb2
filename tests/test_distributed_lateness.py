"""No global blocking, shown: eight processes, one of them late, and who of the others waits for it."""

import json
import subprocess
import sys

import numpy as np
import processes
import pytest

from noloco_jax.lateness import Late, linked

LATE, SECONDS = 3, 6.0


def test_lateness_spreads_by_meetings_alone():
    rounds = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))]
    assert linked(rounds, [Late(2, 15, 1.0)], sync_every=10) == [set(), {0, 2}, {0, 1, 2, 3}]
    assert linked(rounds, [Late(2, 10, 1.0)], sync_every=10) == [{2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}]
    assert linked([((0, 1, 2, 3),)], [Late(0, 1, 1.0)], sync_every=10) == [{0, 1, 2, 3}]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, list[dict]]:
    """Rounds after steps 3, 6, 9 and 12; one process is late at step 8. Till 12 nothing else spans them."""
    folder = tmp_path_factory.mktemp("lateness")
    config = processes.write_config(folder)
    fields = {"num_replicas": 8, "num_steps": 12, "outer.sync_every": 3, "eval_every": 12, "checkpoint_every": 12}
    command = [
        *(sys.executable, "-m", "noloco_jax.lateness", f"--config={config}", f"--workdir={folder / 'runs'}"),
        *("--processes=8", f"--late={LATE}:8:{SECONDS}", *(f"--config.{name}={x}" for name, x in fields.items())),
    ]
    called = subprocess.run(
        command, env=processes.environment(config), cwd=processes.ROOT, capture_output=True, text=True, timeout=800
    )
    assert called.returncode == 0, called.stdout + called.stderr
    return json.loads((folder / "runs/lateness.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_noloco_only_those_linked_to_the_late_process_wait(rows):
    _, before, during, after = rows["noloco"]  # in the first round, processes also wait for those that started later
    assert max(before["seconds"]) < SECONDS / 2
    [partners] = [group for group in during["groups"] if LATE in group]
    assert sorted(partners) == during["can_wait"]
    waited = {i for i, seconds in enumerate(during["seconds"]) if seconds > SECONDS / 2}
    assert waited == set(partners) - {LATE}
    waited = {i for i, seconds in enumerate(after["seconds"]) if seconds > SECONDS / 2}
    assert waited <= set(after["can_wait"])
    assert len(after["can_wait"]) == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_diloco_all_wait_for_the_late_process(rows):
    _, _, during, _ = rows["diloco"]
    assert during["can_wait"] == list(range(8))
    others = np.delete(during["seconds"], LATE)
    assert min(others) > SECONDS / 2
