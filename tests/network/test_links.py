"""Hosts on slow links: rate, latency, names, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from noloco_jax.errors import UserError
from noloco_jax.tools.network import command
from noloco_jax.tools.network.links import Hosts, check_host

pytestmark = pytest.mark.real_time

# Sends `size` bytes to host 0, which answers with one byte; host 1 prints the seconds.
RECEIVE = """
import socket, sys
with socket.create_server(("0.0.0.0", 7000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    left = int(sys.argv[1])
    while left:
        left -= len(connection.recv(min(left, 1 << 16)))
    connection.sendall(b"!")
    connection.recv(1)
"""
SEND = """
import socket, sys, time
with socket.create_connection(("host0", 7000)) as connection:
    started = time.perf_counter()
    connection.sendall(bytes(int(sys.argv[1])))
    connection.recv(1)
    print(time.perf_counter() - started, socket.gethostname())
"""


@pytest.fixture(scope="module", autouse=True)
def needs_namespaces():
    try:
        check_host()
    except UserError as error:
        pytest.skip(str(error))


def wait_for(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None and process.stdout.readline() == "ready\n"


def transfer(hosts: Hosts, size: int) -> float:
    """Return the seconds in which host 1 sends so many bytes to host 0 and hears that they are there."""
    receiver = hosts.start(0, [sys.executable, "-c", RECEIVE, str(size)], stdout=subprocess.PIPE, text=True)
    wait_for(receiver)
    sender = hosts.start(1, [sys.executable, "-c", SEND, str(size)], stdout=subprocess.PIPE, text=True)
    seconds, name = sender.communicate(timeout=60)[0].split()
    receiver.communicate(timeout=60)
    assert name == "host1"
    return float(seconds)


def test_a_transfer_takes_its_bytes_over_the_slower_rate_of_both_links(tmp_path: Path):
    with Hosts([40e6, 8e6], 0, tmp_path) as hosts:
        assert transfer(hosts, 1_000_000) == pytest.approx(1.0, abs=0.25)


def test_a_byte_and_its_answer_take_two_latencies(tmp_path: Path):
    with Hosts([float("inf")] * 2, 0.05, tmp_path) as hosts:
        transfer(hosts, 1)  # learns the addresses
        assert transfer(hosts, 1) == pytest.approx(0.1, abs=0.04)


def test_processes_that_fail_at_the_same_moment_are_an_error_with_the_last_line_of_the_log(tmp_path: Path):
    with Hosts([float("inf")] * 2, 0, tmp_path) as hosts, pytest.raises(UserError, match=r"host[01] failed: too bad"):
        command.run_on_hosts(hosts, [["sh", "-c", "echo too bad; exit 2"]] * 2, tmp_path, [{}] * 2)


def namespaces() -> set[str]:
    """Return the network namespaces of all processes."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(process / "ns/net"))
        except OSError:  # it has ended
            continue
    return found


PROGRAM = """
import sys, time
from pathlib import Path
from noloco_jax.tools.network.links import Hosts
with Hosts([1e6] * 2, 0.01, Path(sys.argv[1])) as hosts:
    hosts.start(0, ["sleep", "600"])
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_hosts_however_their_process_ends(tmp_path: Path, number: int):
    before = namespaces()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    wait_for(process)
    assert len(namespaces() - before) == 3  # the switch and two hosts
    os.killpg(process.pid, number)  # a terminal's Ctrl-C comes to the whole group
    process.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while left := namespaces() - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
