"""Where a process stands by its flags or environment, and the roll call of a run's processes."""

import contextlib
import errno
import json
import socket
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable

import pytest

from noloco_jax.cluster import rollcall
from noloco_jax.cluster.join import Place, define_flags, find_place
from noloco_jax.cluster.rollcall import Card, call_the_roll
from noloco_jax.errors import StartError, UserError, main_with_errors
from support.processes import free_port


def place(arguments: str = "", **environment: str) -> Place | None:
    parser = ArgumentParser()
    define_flags(parser)
    return find_place(parser.parse_args(arguments.split()), environment)


def test_a_process_alone_is_not_distributed():
    assert place() is None
    assert place("--num_processes=1") is None
    assert place(SLURM_JOB_ID="7", SLURM_STEP_NODELIST="a", SLURM_NTASKS="1", SLURM_PROCID="0") is None
    assert place(OMPI_COMM_WORLD_SIZE="1", OMPI_COMM_WORLD_RANK="0") is None


def test_flags_say_where_a_process_stands():
    assert place("--coordinator=host:1 --num_processes=4 --process_id=3") == Place("host:1", 4, 3)


def test_flags_go_before_the_environment():
    variables = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    assert place(**variables) == Place("a:1", 2, 1)
    assert place("--coordinator=b:2", **variables) == Place("b:2", 2, 1)


def test_a_pod_of_an_indexed_job_takes_its_index():
    variables = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JOB_COMPLETION_INDEX": "1"}
    assert place(**variables) == Place("a:1", 2, 1)


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node1", "node1"), ("a,b", "a"), ("gpu[007-009,12],b", "gpu007"), ("gpu[3,5]", "gpu3")],
)
def test_slurm_tasks_meet_on_the_first_node_of_the_step(nodes, first):
    found = place(**SLURM, SLURM_STEP_NODELIST=nodes, SLURM_STEP_NUM_NODES="4")
    assert found is not None
    host, _, port = found.coordinator.partition(":")
    assert (host, found.num_processes, found.process_id) == (first, 4, 2)
    assert 61440 <= int(port) < 65536


def test_tasks_that_share_a_node_take_a_gpu_each():
    crowded = SLURM | {"SLURM_STEP_NODELIST": "a[1-2]", "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "1"}
    found = [place(**crowded), place(**crowded, CUDA_VISIBLE_DEVICES="0,1"), place(**crowded, CUDA_VISIBLE_DEVICES="3")]
    assert [p and p.local_devices for p in found] == [(1,), (1,), None]


def test_open_mpi_ranks_meet_at_the_launcher():
    uri = "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"
    found = place(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="1", OMPI_MCA_orte_hnp_uri=uri)
    assert found is not None
    assert (found.coordinator.partition(":")[0], found.num_processes, found.process_id) == ("10.96.0.1", 2, 1)


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
        place(arguments)


def roll_call(
    cards: list[Card], timeout: float, expected: int | None = None, visit: Callable[[int], None] = lambda port: None
) -> list[UserError | None]:
    """What each process, given by its card, is told: None if all is well. `visit` comes to the first one's port."""
    port = free_port()
    verdicts: list[UserError | None] = [None] * len(cards)

    def answer(position: int, card: Card) -> None:
        try:
            call_the_roll(f"127.0.0.1:{port}", expected or len(cards), card, timeout)
        except UserError as error:
            verdicts[position] = error

    threads = [threading.Thread(target=answer, args=item) for item in enumerate(cards)]
    threads[0].start()
    visit(port)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    return verdicts


def connect(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except ConnectionRefusedError:
            time.sleep(0.01)


def cards(number: int, **same) -> list[Card]:
    return [Card(i, f"host{i}", {"jax": "0.10.2", "config.seed": 0, **same}) for i in range(number)]


def test_processes_that_are_alike_pass():
    assert roll_call(cards(5), timeout=20) == [None] * 5


def test_a_missing_process_is_named_to_all_that_came():
    start = time.monotonic()
    verdicts = roll_call([cards(4)[0], cards(4)[2]], timeout=1, expected=4)
    assert time.monotonic() - start < 15
    for verdict in verdicts:
        assert "process 1, 3 of 4 did not come within 1 s (there are 0 on host0, 2 on host2)" in str(verdict)


def test_a_missing_coordinator_is_named():
    [verdict] = roll_call([cards(2)[1]], timeout=0.5, expected=2)
    assert "process 0 did not answer at 127.0.0.1:" in str(verdict)


@pytest.mark.parametrize(("name", "value"), [("jax", "0.12.0"), ("config.seed", 1), ("config.new", 5)])
def test_a_process_that_differs_is_named_to_all(name, value):
    three = cards(3)
    three[2] = three[2]._replace(same={**three[2].same, name: value})
    verdicts = roll_call(three, timeout=5)
    assert f"process 2 on host2 has {name}={value!r}, process 0 on host0 has" in str(verdicts[0])
    assert str(verdicts[2]) == str(verdicts[0])


def test_two_processes_with_one_number_are_named_to_all():
    verdicts = roll_call([*cards(2), cards(2)[1]._replace(host="other")], timeout=5, expected=3)
    for verdict in verdicts:
        assert "two processes, on " in str(verdict)
        assert "have --process_id=1" in str(verdict)


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "silent"])
def test_a_process_takes_the_place_of_one_that_is_gone(ended, monkeypatch):
    """It came and ended, or its machine is lost: then the connection stays, and nobody answers."""
    monkeypatch.setattr(rollcall, "_ANSWER_SECONDS", 1.0)
    connections = contextlib.ExitStack()

    def come_and_go(port: int) -> None:
        connection = connections.enter_context(connect(port))
        connection.sendall(json.dumps(cards(3)[1]).encode() + b"\n")
        if ended:
            connection.close()

    with connections:
        verdicts = roll_call([cards(3)[0], cards(3)[1]._replace(host="new")], 3, expected=3, visit=come_and_go)
    for verdict in verdicts:
        assert "process 2 of 3 did not come within 3 s (there are 0 on host0, 1 on new)" in str(verdict)


@pytest.mark.parametrize(
    ("came", "status"),
    [
        ([cards(3)[0], cards(3)[2]], 1),
        ([cards(3)[1]], 1),
        ([cards(3)[0], cards(3, jax="0.12.0")[1]], 2),
        ([*cards(2), cards(2)[1]], 2),
    ],
    ids=["one missing", "no coordinator", "one different", "one twice"],
)
def test_only_a_mistake_has_the_status_with_which_launchers_give_up(came, status):
    assert [verdict and verdict.exit_status for verdict in roll_call(came, 2, expected=3)] == [status] * len(came)


def test_too_few_open_files_are_named_to_those_that_came(monkeypatch):
    def accept(listener):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", accept)
    with pytest.raises(StartError, match=r"cannot take more than 0 processes \(Too many open files\).*ulimit -n"):
        call_the_roll(f"127.0.0.1:{free_port()}", 2, cards(2)[0], 5)


def test_a_command_exits_with_the_status_of_its_error(capsys):
    def main() -> int:
        raise StartError("process 1 did not come")

    with pytest.raises(SystemExit) as exit:
        main_with_errors(main)
    assert exit.value.code == StartError.exit_status == 1
    assert capsys.readouterr().err == "error: process 1 did not come\n"


def test_a_port_in_use_is_named():
    refused = pytest.raises(StartError, match="process 0 on host0 cannot listen on port")
    with socket.create_server(("", 0)) as taken, refused:
        call_the_roll(f"127.0.0.1:{taken.getsockname()[1]}", 2, cards(2)[0], 1)


def test_a_stranger_at_the_port_is_ignored():
    def stranger(port: int) -> None:
        with connect(port) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")

    assert roll_call(cards(2), 20, visit=stranger) == [None] * 2
