"""Processes of a run: their start, barriers, gathers, broadcasts and stops, of one and of two real ones."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from jax.experimental import multihost_utils

from noloco_jax.cluster.processes import DistributedProcesses, OneProcess, is_of_exchange, run_processes
from support import processes
from support.paths import ROOT
from support.ports import free_port

# Joins a run, and then does what a test adds.
PROGRAM = """
import json, os, signal, sys, time
from argparse import Namespace
from noloco_jax.cluster.process_rank import find_rank
from noloco_jax.cluster.start import distributed_runtime

config, seconds, *arguments = sys.argv[1:]
rank = find_rank(Namespace(coordinator=None, num_processes=None, process_id=None), os.environ)
with distributed_runtime(rank, json.loads(config), float(seconds)) as num_processes:
    import jax
    from noloco_jax.cluster import processes as module
    processes = module.run_processes()
    print("JOINED", num_processes, jax.process_index())
"""


def start(then: str = "", *values: str, config: str = "{}", seconds: str = "60", **place: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "SLURM_"))}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM + textwrap.indent(then, "    "), config, seconds, *values],
        env=inherited | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | place,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def given(address: str, number: int) -> dict[str, str]:
    return {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(number)}


def run_both(then: str, *arguments: str) -> list[tuple[int, str]]:
    """Run a program as two processes; return (exit status, output) of each."""
    address = f"127.0.0.1:{free_port()}"
    return processes.finish([start(then, *arguments, **given(address, number)) for number in range(2)], patience=500)


def test_a_missing_process_ends_the_others_with_one_line_and_status_1():
    """By itself, JAX would abort them with a signal."""
    [(status, output)] = processes.finish([start(seconds="2", **given(f"127.0.0.1:{free_port()}", 0))])
    assert status == 1, output
    assert output.splitlines()[-1].startswith("error: the processes of the run did not come together within 2 s: start")
    assert "JOINED" not in output


def test_a_process_with_another_configuration_is_named_by_all():
    address = f"127.0.0.1:{free_port()}"
    configs = ('{"seed": 0, "group": {"lr": 1.0}}', '{"seed": 0, "group": {"lr": 2.0}}')
    started = [start(config=config, **given(address, number)) for number, config in enumerate(configs)]
    results = processes.finish(started)
    assert [status for status, _ in results] == [2, 2], processes.report(results)
    for number, (_, output) in enumerate(results):
        line = output.splitlines()[-1]
        assert "process 1 on" in line and "has config.group.lr=2.0, process 0 on" in line and "has 1.0" in line
        assert line.endswith(f"(process {number} on {os.uname().nodename})")


def test_slurm_tasks_find_each_other_by_its_variables_alone():
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    slurm |= {"JAX_COORDINATOR_PORT": str(free_port())}
    started = [start(**slurm, SLURM_PROCID=str(i), SLURM_LOCALID=str(i)) for i in range(2)]
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


def test_a_single_process_gathers_broadcasts_and_stops_alone():
    alone = run_processes()
    assert isinstance(alone, OneProcess) and alone.alone
    assert alone.gather({"step": 3}) == [{"step": 3}]
    alone.barrier("start")
    assert alone.is_first and alone.broadcast(lambda: "decided") == "decided"
    assert [alone.agree_to_stop(received) for received in (False, True)] == [False, True]


# Process 0 broadcasts more values than the store keeps. Both gather values of different sizes, process 1 is late at a
# barrier, and process 0 sends itself a SIGTERM.
SEVERAL = """
module._KEPT = 10
asked = []
told = [processes.broadcast(lambda: asked.append(i) or {"number": i, "by": jax.process_index()}) for i in range(5)]
processes.barrier("told")
told += [processes.broadcast(lambda: {"number": i, "by": jax.process_index()}) for i in range(5, 14)]
processes.barrier("more")
told += [processes.broadcast(lambda: {"number": i, "by": jax.process_index()}) for i in range(14, 24)]
kept = len(module.distributed.global_state.client.key_value_dir_get(module._BROADCASTS))
gathered = processes.gather({"process": jax.process_index(), "text": "x" * 5000 * jax.process_index()})
processes.barrier("before")
if jax.process_index() == 1:
    time.sleep(1)
came = time.monotonic()
processes.barrier("late")
left = time.monotonic()
processes.agree_to_stop(False)
if jax.process_index() == 0:
    os.kill(os.getpid(), signal.SIGTERM)
step = 1
while not processes.agree_to_stop(False):
    time.sleep(0.02 * (1 + jax.process_index()))  # different speeds
    step += 1
result = {"told": told, "asked": asked, "kept": kept, "first": processes.is_first}
result |= {"alone": processes.alone, "gathered": gathered, "came": came, "left": left, "stopped_at": step}
print("RESULT", json.dumps(result))
"""


@pytest.fixture(scope="module")
def results() -> list[dict]:
    finished = run_both(SEVERAL)
    assert [status for status, _ in finished] == [0, 0], processes.report(finished)
    lines = [line for _, output in finished for line in output.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


def test_gather_returns_all_values_in_process_order(results):
    expected = [{"process": 0, "text": ""}, {"process": 1, "text": "x" * 5000}]
    assert [result["gathered"] for result in results] == [expected] * 2
    assert [result["alone"] for result in results] == [False] * 2


def test_all_processes_receive_the_broadcasts_of_the_first_in_order(results):
    assert [result["told"] for result in results] == [[{"number": i, "by": 0} for i in range(24)]] * 2
    assert [result["asked"] for result in results] == [[0, 1, 2, 3, 4], []]
    assert [result["first"] for result in results] == [True, False]


def test_broadcasts_received_by_all_are_deleted(results):
    assert results[0]["kept"] == 14  # of 24: the second ten, and four


def test_a_barrier_holds_early_processes_until_the_last_arrives(results):
    early, late = results
    assert early["left"] >= late["came"]  # processes of one machine share the clock


def test_all_processes_stop_at_the_same_step_after_one_gets_sigterm(results):
    first, second = (result["stopped_at"] for result in results)
    assert first == second


# One of two processes is killed while the other gathers or only sleeps.
LOST = """
processes.gather(1)
if jax.process_index() == int(arguments[0]):
    os.kill(os.getpid(), signal.SIGKILL)
if arguments[1] == "exchange":
    processes.gather(2)
time.sleep(300)
"""


@pytest.mark.parametrize(("victim", "doing"), [(0, "wait"), (1, "exchange")])
def test_a_lost_process_ends_the_other_with_one_line_and_status_1(victim, doing):
    status, output = run_both(LOST, str(victim), doing)[1 - victim]
    assert status == 1, output
    line = output.splitlines()[-1]
    assert (
        line.startswith("error: ")
        and f"the same command resumes from the last checkpoint (process {1 - victim} on" in line
    )
    assert "Traceback" not in output


# Process 1 arrives after Gloo's timeout, within which `gather` alone would have to start.
WAITING = """
time.sleep(35 * jax.process_index())
processes.wait_at("late", 60)
print("RESULT", processes.gather(jax.process_index()))
"""


@pytest.mark.slow
def test_processes_wait_longer_than_gloos_timeout_for_a_busy_one():
    results = run_both(WAITING)
    assert [status for status, _ in results] == [0, 0], processes.report(results)
    assert all("RESULT [0, 1]" in output for _, output in results)


def test_a_preemption_sync_point_stops_every_later_caller(monkeypatch):
    monkeypatch.setattr(DistributedProcesses, "_asked", 0)
    monkeypatch.setattr(DistributedProcesses, "_stops", False)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda number: number == 2)
    trainer, island = DistributedProcesses(), DistributedProcesses()
    assert [one.agree_to_stop(False) for one in (trainer, island, trainer, island)] == [False, True, True, True]
