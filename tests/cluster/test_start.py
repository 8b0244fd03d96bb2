"""Start of a distributed run: processes that are missing, differ, or that JAX places by Slurm's variables."""

import os
import subprocess
import sys

import pytest

from noloco_jax.cluster.processes import is_of_exchange
from support import processes
from support.paths import ROOT
from support.ports import free_port

PROGRAM = """
import json, os, sys
from argparse import Namespace
from noloco_jax.cluster.place import find_place
from noloco_jax.cluster.start import joined

place = find_place(Namespace(coordinator=None, num_processes=None, process_id=None), os.environ)
with joined(place, json.loads(sys.argv[1]), float(sys.argv[2])) as num_processes:
    import jax
    print("JOINED", num_processes, jax.process_index())
"""


def start(config: str, seconds: int, **variables: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "SLURM_"))}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, config, str(seconds)],
        env=inherited | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def given(address: str, number: int) -> dict[str, str]:
    return {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(number)}


def test_a_missing_process_ends_the_others_with_one_line_and_status_1():
    """By itself, JAX would abort them with a signal."""
    [(status, output)] = processes.finish([start("{}", 2, **given(f"127.0.0.1:{free_port()}", 0))])
    assert status == 1, output
    assert output.splitlines()[-1].startswith("error: the processes of the run did not come together within 2 s: start")
    assert "JOINED" not in output


def test_a_process_with_another_configuration_is_named_by_all():
    address = f"127.0.0.1:{free_port()}"
    configs = ('{"seed": 0, "group": {"lr": 1.0}}', '{"seed": 0, "group": {"lr": 2.0}}')
    started = [start(config, 60, **given(address, number)) for number, config in enumerate(configs)]
    results = processes.finish(started)
    assert [status for status, _ in results] == [2, 2], processes.report(results)
    for number, (_, output) in enumerate(results):
        line = output.splitlines()[-1]
        assert "process 1 on" in line and "has config.group.lr=2.0, process 0 on" in line and "has 1.0" in line
        assert line.endswith(f"(process {number} on {os.uname().nodename})")


def test_slurm_tasks_find_each_other_by_its_variables_alone():
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    slurm |= {"JAX_COORDINATOR_PORT": str(free_port())}
    started = [start("{}", 60, **slurm, SLURM_PROCID=str(i), SLURM_LOCALID=str(i)) for i in range(2)]
    results = processes.finish(started)
    assert [status for status, _ in results] == [0, 0], processes.report(results)
    assert [output.splitlines()[-1] for _, output in results] == ["JOINED 2 0", "JOINED 2 1"]


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [
        ("Gloo all-reduce failed: Connection closed by peer", True),
        ("NCCL operation ncclGroupEnd() failed: remote process exited or there was a network error", True),
        ("NCCL operation ncclCommInitRank failed: unhandled system error", True),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.", False),
        ("NCCL operation failed: invalid usage", False),
    ],
)
def test_errors_of_a_lost_peer_are_recognized(message, is_lost):
    assert is_of_exchange(RuntimeError(message)) is is_lost
