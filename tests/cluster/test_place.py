"""The number and the GPUs of a process, found from its flags and environment."""

from argparse import ArgumentParser

import pytest

from noloco_jax.cluster import local_gpus, tpu_pods
from noloco_jax.cluster.local_gpus import own_gpus
from noloco_jax.cluster.place import Place, define_flags, find_place
from noloco_jax.cluster.tpu_pods import find_pod
from noloco_jax.errors import UserError


def found(arguments: str = "", **environment: str) -> Place | None:
    """Return the place of a process on a machine with eight GPUs."""
    parser = ArgumentParser()
    define_flags(parser)
    return find_place(
        parser.parse_args(arguments.split()),
        environment,
        count_gpus=lambda: 8,
        find_tpu_pod=lambda environment: find_pod(environment, lambda name: None),
    )


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        ("", {}),
        ("--num_processes=1", {}),
        ("", {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "a", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}),
        ("", {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}),
    ],
    ids=["nothing", "flag", "Slurm", "Open MPI"],
)
def test_a_process_alone_is_not_distributed(arguments, environment):
    assert found(arguments, **environment) is None


def test_flags_give_coordinator_and_process_number():
    assert found("--coordinator=host:1 --num_processes=4 --process_id=3") == Place("host:1", 4, 3)


@pytest.mark.parametrize(("flags", "coordinator"), [("", "a:1"), ("--coordinator=b:2", "b:2")])
def test_flags_take_precedence_over_the_environment(flags, coordinator):
    variables = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    assert found(flags, **variables) == Place(coordinator, 2, 1)


def test_a_pod_of_an_indexed_job_takes_its_index():
    variables = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JOB_COMPLETION_INDEX": "1"}
    assert found(**variables) == Place("a:1", 2, 1)


def test_the_process_number_takes_precedence_over_the_pod_index():
    variables = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "16", "JAX_PROCESS_ID": "11"}
    assert found(**variables, JOB_COMPLETION_INDEX="1") == Place("a:1", 16, 11)


# Task 2 of a step of 4 nodes with one task each; it runs on the third node.
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-4]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node1", "node1"), ("a,b", "a"), ("gpu[007-009,12],b", "gpu007"), ("gpu[3,5]", "gpu3")],
)
def test_slurm_tasks_use_the_first_node_of_the_step_as_coordinator(nodes, first):
    task = found(**SLURM | {"SLURM_STEP_NODELIST": nodes})
    assert task is not None
    host, _, port = task.coordinator.partition(":")
    assert (host, task.num_processes, task.process_id) == (first, 4, 2)
    assert 61440 <= int(port) < 65536


# Rank 1 of 2, on one machine.
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}


def test_open_mpi_ranks_use_the_launcher_as_coordinator():
    rank = found(**OPEN_MPI)
    assert rank is not None
    assert (rank.coordinator.partition(":")[0], rank.num_processes, rank.process_id) == ("10.96.0.1", 2, 1)


def test_open_mpi_jobs_on_one_machine_use_different_ports():
    """Open MPI numbers its jobs in steps of 4096."""
    other = "1531580416.0;tcp://10.96.0.1,10.148.0.1:34912"
    first, second = found(**OPEN_MPI), found(**OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": other})
    assert first is not None and second is not None
    assert first.coordinator != second.coordinator


def test_open_mpi_ranks_take_precedence_over_slurm_tasks():
    """Ranks of mpirun on other nodes than the first inherit the variables of the Slurm task that started them."""
    rank = found(**SLURM, **OPEN_MPI)
    assert rank is not None
    assert (rank.num_processes, rank.process_id) == (2, 1)


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


def slurm(local: int, tasks: str, node: int = 0, visible: str = "", on_node: int | None = None, **more: str) -> dict:
    """Return the variables of a Slurm task: its local number, the tasks of each node, and the GPUs visible to it.

    `on_node` is the number of GPUs that the step has on the node, by default of those visible to the task.
    """
    count = len(visible.split(",")) if on_node is None else on_node
    gpus = {"CUDA_VISIBLE_DEVICES": visible, "SLURM_GPUS_ON_NODE": str(count)} if visible else {}
    place = {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
    return SLURM | place | gpus | more


def open_mpi(local: int, number: int, **more: str) -> dict:
    return OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": str(local), "OMPI_COMM_WORLD_LOCAL_SIZE": str(number)} | more


EIGHT = "0,1,2,3,4,5,6,7"
OWN = {
    # srun --ntasks-per-node=8 --gpus-per-node=8: all see all
    "a task a GPU, first": (slurm(0, "8(x4)", visible=EIGHT), (0,)),
    "a task a GPU, last": (slurm(7, "8(x4)", visible=EIGHT), (7,)),
    # srun --ntasks-per-node=4 --gpus-per-node=8
    "two GPUs a task, first": (slurm(0, "4(x4)", visible=EIGHT), (0, 1)),
    "two GPUs a task, last": (slurm(3, "4(x4)", visible=EIGHT), (6, 7)),
    # srun --ntasks-per-node=1 --gpus-per-node=8
    "a task a node": (slurm(0, "1(x4)", visible=EIGHT), None),
    # --gpus-per-task=2 since 21.08: a task sees its own; SLURM_GPUS_PER_TASK is gone from 23.11 on
    "gpus-per-task": (slurm(1, "4(x4)", visible="2,3", on_node=8, SLURM_GPUS_PER_TASK="2"), None),
    "gpus-per-task, type": (slurm(1, "4(x4)", visible="2,3", on_node=8, SLURM_GPUS_PER_TASK="a100:2"), None),
    "gpus-per-task, types": (slurm(0, "2(x4)", visible="0,1", on_node=4, SLURM_GPUS_PER_TASK="a:1,b:1"), None),
    "tres-per-task": (slurm(1, "4(x4)", visible="2,3", on_node=8, SLURM_TRES_PER_TASK="cpu=4,gres/gpu=2"), None),
    "renumbered from 0": (slurm(1, "4(x4)", visible="0,1", on_node=2, SLURM_TRES_PER_TASK="gres/gpu:a100:2"), None),
    "gpus-per-task=1": (slurm(3, "8(x4)", visible="3", on_node=8, SLURM_GPUS_PER_TASK="1"), None),
    # --gpus-per-task=2 --gpu-bind=none, or before 21.08: a task sees the others' too
    "gpus-per-task, unbound": (slurm(1, "4(x4)", visible=EIGHT, SLURM_GPUS_PER_TASK="2"), (2, 3)),
    "cpus alone per task": (slurm(1, "4(x4)", visible=EIGHT, SLURM_TRES_PER_TASK="cpu=8"), (2, 3)),
    # --gpu-bind=mask:3,c; --gpu-bind=closest with a task a socket
    "bound otherwise": (slurm(1, "2(x4)", visible="2,3", on_node=4), None),
    "uneven nodes, first": (slurm(1, "4(x2),2", node=1, visible=EIGHT), (2, 3)),
    "uneven nodes, last": (slurm(1, "4(x2),2", node=2, visible=EIGHT), (4, 5, 6, 7)),
    "tasks per node alone": (slurm(1, "", visible=EIGHT, SLURM_NTASKS_PER_NODE="8"), (1,)),
    "GPUs by name": (slurm(1, "2(x4)", visible="GPU-1e,GPU-2e"), (1,)),
    "no GPU visible": (slurm(1, "2(x4)", visible="-1", on_node=0), None),
    "unknown to Slurm": (slurm(1, "2(x4)"), (4, 5, 6, 7)),  # the machine's eight
    "a CPU run": (slurm(1, "3(x4)", visible=EIGHT, JAX_PLATFORMS="cpu"), None),
    "said by the user": (slurm(1, "4(x4)", visible=EIGHT, JAX_LOCAL_DEVICE_IDS="5"), None),
    # mpirun -n 4
    "Open MPI": (open_mpi(3, 4), (6, 7)),
    "Open MPI, some GPUs": (open_mpi(1, 2, CUDA_VISIBLE_DEVICES="4,5"), (1,)),
    "Open MPI, a wrapper": (open_mpi(1, 2, CUDA_VISIBLE_DEVICES="1"), None),
    "Open MPI, one a machine": (open_mpi(0, 1), None),
}


@pytest.mark.parametrize(("environment", "expected"), OWN.values(), ids=OWN)
def test_a_process_takes_its_own_gpus_of_a_machine_of_eight(environment, expected):
    process = found(**environment)
    assert process is not None
    assert process.local_device_ids == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            slurm(0, "3(x4)", visible=EIGHT),
            "the 3 processes of this machine cannot share its 8 GPUs evenly: start 8",
        ),
        (
            slurm(1, "4(x4)", visible="0,1"),
            "the 4 processes of this machine cannot share its 2 GPUs evenly: start 2",
        ),
        (slurm(1, "4(x4)", visible="0"), "the 4 processes of this machine cannot share its 1 GPUs evenly: start 1"),
        (open_mpi(1, 3), "the 3 processes of this machine cannot share its 8 GPUs evenly"),
        (slurm(1, "4(x4)", visible="0,1", on_node=4), "Slurm shows 2 of the node's 4 GPUs to each of its 4 tasks"),
    ],
    ids=["no divisor", "too few", "one", "Open MPI", "closest"],
)
def test_gpus_that_cannot_be_shared_are_refused(environment, message):
    with pytest.raises(UserError, match=message):
        found(**environment)


def test_the_processes_of_a_machine_take_every_gpu_once():
    shares = [own_gpus({}, rank, 4, lambda: 8) for rank in range(4)]
    assert [gpu for share in shares for gpu in share or ()] == list(range(8))


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (["dev/nvidia0", "dev/nvidia1", "dev/nvidiactl", "dev/nvidia-uvm", "proc/driver/nvidia/gpus/0000:01:00.0"], 2),
        (["dev/nvidiactl", "proc/driver/nvidia/gpus/0000:01:00.0"], 1),
        ([], 0),
    ],
    ids=["devices", "driver", "none"],
)
def test_gpus_of_a_machine_are_counted_without_cuda(devices, expected, tmp_path, monkeypatch):
    for device in devices:
        (tmp_path / device).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / device).touch()
    real = local_gpus.Path
    monkeypatch.setattr(local_gpus, "Path", lambda path: real(tmp_path / path.lstrip("/")))
    assert local_gpus.gpus_of_machine() == expected


POD = {"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_WORKER_ID": "2"}


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({}, Place("a:8482", 4, 2)),
        ({"TPU_WORKER_HOSTNAMES": "a:8471,b:8471,c:8471"}, Place("a:8482", 3, 2)),
        (
            {
                "MEGASCALE_NUM_SLICES": "3",
                "MEGASCALE_SLICE_ID": "1",
                "MEGASCALE_COORDINATOR_ADDRESS": "first.of.all:8080",
            },
            Place("first.of.all:8482", 12, 6),
        ),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
        ({"JAX_COORDINATOR_ADDRESS": "x:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, Place("x:1", 2, 1)),
    ],
    ids=["slice", "ports", "slices", "one host", "told otherwise"],
)
def test_a_host_of_a_tpu_pod_on_kubernetes_knows_its_place(more, place):
    assert found(**{**POD, **more}) == place


@pytest.mark.parametrize("endpoints", ["a,b", "unknown:0:a,unknown:1:b"])
def test_a_tpu_machine_asks_the_metadata_server(endpoints):
    facts = {"worker-network-endpoints": endpoints, "agent-worker-number": "1"}
    assert find_pod({}, facts.get) == ("a:8482", 2, 1)
    assert find_pod({"TPU_SKIP_MDS_QUERY": "1"}, facts.get) is None
    slices = {"tpu-env": "ACCELERATOR_TYPE: 'v5e'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n"}
    assert find_pod({}, {**facts, **slices}.get) == ("a:8482", 4, 3)


def test_a_tpu_host_without_a_number_is_told_how_to_give_it():
    with pytest.raises(UserError, match="give its place by --coordinator"):
        found(TPU_WORKER_HOSTNAMES="a,b")


def test_tpus_are_detected_by_their_device_files(tmp_path):
    assert not tpu_pods._has_tpus(tmp_path)
    (tmp_path / "accel0").touch()
    assert tpu_pods._has_tpus(tmp_path)
