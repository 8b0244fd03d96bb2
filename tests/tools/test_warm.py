"""Processes forked by `support.warm` against ones that Python starts."""

import os
import signal
import subprocess
import sys

import pytest

from support import processes, warm

PROGRAM = """
import os, signal, sys
print(sys.argv, sys.path[:3], os.getcwd(), os.getppid(), __name__, sys.stdin.read(), flush=True)
print(sorted(os.environ.items()), file=sys.stderr, flush=True)
print(len(os.listdir("/proc/self/fd")), flush=True)
if sys.argv[1] == "signal":
    os.kill(os.getpid(), signal.SIGTERM)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux alone")
@pytest.mark.parametrize(("argument", "status"), [("3", 3), ("signal", -signal.SIGTERM)])
def test_a_forked_process_has_the_place_streams_and_end_of_a_started_one(argument, status, tmp_path, config):
    (tmp_path / "shown.py").write_text(PROGRAM)
    (tmp_path / "input").write_text("input")
    environment = processes.environment(config) | {"JAX_PROCESS_ID": "3", "OWN": "x"}
    printed = []
    for popen in (subprocess.Popen, warm.Popen):
        with (tmp_path / "input").open() as given:
            process = popen(
                [sys.executable, "-m", "shown", argument],
                env=environment,
                cwd=tmp_path,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        printed.append((process.communicate(timeout=120), process.returncode))
    assert printed[0] == printed[1]
    assert printed[1][1] == status and f" {os.getpid()} __main__ input" in printed[1][0][0]
