"""The slow link of two processes: its arithmetic, and the link itself where network namespaces are allowed."""

import os
import re
import runpy
import socket
import subprocess
import sys

import pytest

from support.paths import ROOT

SCRIPT = ROOT / "launch/slow_link.py"


def has_namespaces() -> bool:
    if os.geteuid() != 0 or not os.access("/dev/net/tun", os.W_OK):
        return False
    try:
        return subprocess.run(["unshare", "--net", "--uts", "ip", "link"], capture_output=True).returncode == 0
    except OSError:
        return False


needs_namespaces = pytest.mark.skipif(not has_namespaces(), reason="needs root, /dev/net/tun, ip and unshare")


def linked(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run `code` as both processes; `i` in it is the process number."""
    code = f"import os, socket, sys, time; i = int(os.environ['JAX_PROCESS_ID']); {code}"
    command = [sys.executable, str(SCRIPT), *flags, sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_packets_leave_at_the_links_rate_and_arrive_a_delay_later():
    source, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    sink, received = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with source, far, sink, received:
        received.setblocking(False)
        way = runpy.run_path(str(SCRIPT))["Direction"](source.fileno(), sink.fileno(), 1e6, 0.1)
        for number in range(200):  # 10 ms each: two seconds of packets at once, of which one second is queued
            far.send(bytes([number]) * 1250)
            way.accept(5.0)
        assert way.deliver(5.0) == pytest.approx(0.1)  # seconds until the next call
        arrived = []
        for tick in range(1, 300):
            way.deliver(5.0 + 0.01 * tick + 1e-6)
            while True:
                try:
                    arrived.append((tick, received.recv(2000)[0]))
                except BlockingIOError:
                    break
    assert 100 <= len(arrived) <= 101  # the queue holds one second of packets
    assert arrived == [(11 + number, number) for number in range(len(arrived))]


@needs_namespaces
def test_a_message_takes_its_bytes_over_the_rate_plus_the_delay():
    """100 kB at 4 Mbit/s take 0.2 s besides TCP's slow start, a round trip of 0.2 s at a time."""
    code = """
if i == 0:
    server = socket.create_server(("10.77.0.1", 5000))
    peer, _ = server.accept()
    began = time.monotonic()
    peer.sendall(b"a")
    left = 100_000
    while left:
        left -= len(peer.recv(65536))
    print("seconds", time.monotonic() - began)
else:
    while True:
        try:
            peer = socket.create_connection(("10.77.0.1", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    peer.recv(1)
    peer.sendall(bytes(100_000))
"""
    called = linked(f"exec({code!r})", "--mbit=4", "--delay=0.1")
    assert called.returncode == 0, called.stderr
    seconds = re.search(r"seconds (\S+)", called.stdout)
    assert seconds is not None
    assert 0.4 < float(seconds[1]) < 4


@needs_namespaces
def test_a_process_that_fails_ends_the_other_with_its_status():
    called = linked("sys.exit(7) if i else time.sleep(50)")
    assert called.returncode == 7, called.stderr
