"""Absence of global blocking: four processes, a replica each, of which one is late, and who waits for it."""

import re

import pytest

import noloco_jax as nj
from noloco_jax.config import load_config
from support import processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LATE, SECONDS = 3, 4.0
STEP, LAST = 8, 12  # the process is late in the third round; in the first, all wait for whoever starts last
FLAGS = (
    *(f"--config.num_steps={LAST}", "--config.outer.sync_every=3"),
    *("--config.eval_every=12", "--config.checkpoint_every=12"),  # for these, all processes wait
)


def waiting(config, method: str) -> dict[int, list[float]]:
    """Return inner step -> seconds that each process spent in the outer step after it."""
    flags = (*FLAGS, f"--config.method={method}")
    late = ("support.disturbed", f"late:{LATE}:{STEP}:{SECONDS}", "noloco_jax.train")
    results = processes.finish(processes.start(config, config.parent / method, *flags, number=4, module=late))
    assert [status for status, _ in results] == [0] * 4, processes.report(results)
    found = [dict(re.findall(r"outer step after (\d+): (\S+)", output)) for _, output in results]
    return {step: [float(of_process[str(step)]) for of_process in found] for step in range(3, LAST + 1, 3)}


def test_with_noloco_only_the_partner_of_a_late_process_waits_for_it(config):
    seconds = waiting(config, "noloco")
    run = load_config(str(config), [*FLAGS, "--config.num_replicas=4"])
    pairing = nj.RandomPairing(run.num_replicas, seed=run.seed)
    [partners] = [set(group) for group in pairing.pool[int(pairing.pool_index(2))] if LATE in group]
    assert max(seconds[6]) < SECONDS / 2
    assert {i for i, waited in enumerate(seconds[9]) if waited > SECONDS / 2} == partners - {LATE}


def test_with_diloco_all_processes_wait_for_a_late_one(config):
    seconds = waiting(config, "diloco")
    assert {i for i, waited in enumerate(seconds[9]) if waited > SECONDS / 2} == {0, 1, 2}
