"""The place of a process, from its flags and environment, and what is left to JAX."""

from argparse import ArgumentParser

import pytest

from noloco_jax.cluster import process_rank
from noloco_jax.cluster.process_rank import ProcessRank, define_flags, find_rank
from noloco_jax.errors import UserError


@pytest.fixture(autouse=True)
def devices(tmp_path, monkeypatch):
    """Hide the devices of this machine; return the folder in their place."""
    monkeypatch.setattr(process_rank, "_DEVICES", tmp_path)
    return tmp_path


def found(arguments: str = "", **environment: str) -> ProcessRank | None:
    parser = ArgumentParser()
    define_flags(parser)
    return find_rank(parser.parse_args(arguments.split()), environment)


# A task of a step of 2 nodes with 4 tasks each.
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
JAX = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "16", "JAX_PROCESS_ID": "11"}


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        ("", {}),
        ("--num_processes=1", SLURM),
        ("", SLURM | {"SLURM_NTASKS": "1"}),
        ("", {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}),  # a script of sbatch, outside of srun
        ("", {"OMPI_COMM_WORLD_SIZE": "1"}),
        ("", {"TPU_WORKER_HOSTNAMES": "a"}),
    ],
)
def test_a_process_alone_is_not_distributed(arguments, environment):
    assert found(arguments, **environment) is None


@pytest.mark.parametrize(
    "environment",
    [
        SLURM,
        OPEN_MPI,
        {"TPU_WORKER_HOSTNAMES": "a,b"},
        {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"},
    ],
    ids=["Slurm", "Open MPI", "TPU", "TPU slices"],
)
def test_jax_finds_the_place_of_a_launched_process(environment):
    assert found(**environment) == ProcessRank(is_launched=True)


def test_a_tpu_machine_leaves_its_place_to_jax(devices):
    (devices / "accel0").touch()
    assert found() == ProcessRank(is_launched=True)
    assert found(JAX_PLATFORMS="cpu") is None


def test_flags_precede_variables_and_variables_precede_the_launcher():
    assert found("--coordinator=host:1 --num_processes=4 --process_id=3") == ProcessRank("host:1", 4, 3)
    assert found("--coordinator=b:2", **JAX) == ProcessRank("b:2", 16, 11)
    assert found(**JAX, **SLURM) == ProcessRank("a:1", 16, 11, is_launched=True)


def test_a_pod_of_an_indexed_job_takes_its_index():
    variables = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2"}
    assert found(**variables, JOB_COMPLETION_INDEX="1") == ProcessRank("a:1", 2, 1)
    assert found(**variables, JOB_COMPLETION_INDEX="1", JAX_PROCESS_ID="0") == ProcessRank("a:1", 2, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--num_processes=4", "--num_processes=4 without --coordinator and --process_id"),
        ("--coordinator=a:1 --num_processes=4 --process_id=4", "--process_id=4 is not between 0 and --num_processes=4"),
        ("--coordinator=a --num_processes=4 --process_id=0", "--coordinator=a is not HOST:PORT"),
    ],
)
def test_an_incomplete_place_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        found(arguments)


@pytest.mark.parametrize(
    ("environment", "own"),
    [
        (SLURM, None),  # JAX takes the GPU of SLURM_LOCALID
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, None),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "3"}, ()),  # bound: it sees one, which is its own
        (SLURM | {"CUDA_VISIBLE_DEVICES": "2,3", "SLURM_GPUS_PER_TASK": "2"}, ()),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "2,3", "SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=2"}, ()),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "2"}, ()),  # a task a node: all GPUs of the node
        (OPEN_MPI, None),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, ()),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "3", "JAX_LOCAL_DEVICE_IDS": "0"}, None),  # JAX reads it
    ],
)
def test_a_process_takes_all_gpus_it_sees_where_they_are_its_own(environment, own):
    task = found(**environment)
    assert task is not None and task.local_device_ids == own
