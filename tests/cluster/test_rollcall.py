"""The roll call of a run's processes, which are threads here."""

import contextlib
import errno
import json
import socket
import threading
import time
from collections.abc import Callable

import pytest

from noloco_jax.cluster import rollcall
from noloco_jax.cluster.rollcall import ProcessInfo, call_the_roll
from noloco_jax.errors import StartError, UserError, main_with_errors
from support.ports import free_port


def roll_call(
    infos: list[ProcessInfo],
    timeout: float,
    expected: int | None = None,
    visit: Callable[[int], None] = lambda port: None,
) -> list[UserError | None]:
    """Run a roll call; return each process's error or None. `visit` is called with the coordinator's port."""
    port = free_port()
    verdicts: list[UserError | None] = [None] * len(infos)

    def answer(position: int, info: ProcessInfo) -> None:
        try:
            call_the_roll(f"127.0.0.1:{port}", expected or len(infos), info, timeout)
        except UserError as error:
            verdicts[position] = error

    threads = [threading.Thread(target=answer, args=item) for item in enumerate(infos)]
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


def reports(number: int, **must_match) -> list[ProcessInfo]:
    return [ProcessInfo(i, f"host{i}", {"jax": "0.10.2", "config.seed": 0, **must_match}) for i in range(number)]


def test_processes_that_are_alike_pass():
    assert roll_call(reports(5), timeout=20) == [None] * 5


def test_a_missing_process_is_named_to_all_that_came():
    start = time.monotonic()
    verdicts = roll_call([reports(4)[0], reports(4)[2]], timeout=1, expected=4)
    assert time.monotonic() - start < 15
    for verdict in verdicts:
        assert "process 1, 3 of 4 did not come within 1 s (there are 0 on host0, 2 on host2)" in str(verdict)


def test_a_missing_coordinator_is_named():
    [verdict] = roll_call([reports(2)[1]], timeout=0.5, expected=2)
    assert "process 0 did not answer at 127.0.0.1:" in str(verdict)


@pytest.mark.parametrize(("name", "value"), [("jax", "0.12.0"), ("config.seed", 1), ("config.new", 5)])
def test_a_process_that_differs_is_named_to_all(name, value):
    three = reports(3)
    three[2] = three[2]._replace(must_match={**three[2].must_match, name: value})
    verdicts = roll_call(three, timeout=20)
    assert f"process 2 on host2 has {name}={value!r}, process 0 on host0 has" in str(verdicts[0])
    assert str(verdicts[2]) == str(verdicts[0])


def test_two_processes_with_one_number_are_named_to_all():
    verdicts = roll_call([*reports(2), reports(2)[1]._replace(host="other")], timeout=20, expected=3)
    for verdict in verdicts:
        assert "two processes, on " in str(verdict)
        assert "have --process_id=1" in str(verdict)


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "silent"])
def test_a_process_replaces_a_lost_one_of_the_same_number(ended, monkeypatch):
    """The former process ended, or its machine is lost and its connection stays open without an answer."""
    monkeypatch.setattr(rollcall, "_ANSWER_SECONDS", 0.3)
    connections = contextlib.ExitStack()

    def come_and_go(port: int) -> None:
        connection = connections.enter_context(connect(port))
        connection.sendall(json.dumps(reports(3)[1]).encode() + b"\n")
        if ended:
            connection.close()

    with connections:
        verdicts = roll_call([reports(3)[0], reports(3)[1]._replace(host="new")], 1, expected=3, visit=come_and_go)
    for verdict in verdicts:
        assert "process 2 of 3 did not come within 1 s (there are 0 on host0, 1 on new)" in str(verdict)


@pytest.mark.parametrize(
    ("came", "status"),
    [
        ([reports(3)[0], reports(3)[2]], 1),
        ([reports(3)[1]], 1),
        ([reports(3)[0], reports(3, jax="0.12.0")[1]], 2),
        ([*reports(2), reports(2)[1]], 2),
    ],
    ids=["one missing", "no coordinator", "one different", "one twice"],
)
def test_missing_processes_exit_with_status_1_and_user_errors_with_2(came, status):
    assert [verdict and verdict.exit_status for verdict in roll_call(came, 1, expected=3)] == [status] * len(came)


def test_too_low_a_limit_of_open_files_is_named(monkeypatch):
    def accept(listener):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", accept)
    with pytest.raises(StartError, match=r"cannot take more than 0 processes \(Too many open files\).*ulimit -n"):
        call_the_roll(f"127.0.0.1:{free_port()}", 2, reports(2)[0], 5)


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
        call_the_roll(f"127.0.0.1:{taken.getsockname()[1]}", 2, reports(2)[0], 1)


def test_a_foreign_connection_to_the_port_is_ignored():
    def foreign_client(port: int) -> None:
        with connect(port) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")

    assert roll_call(reports(2), 20, visit=foreign_client) == [None] * 2
