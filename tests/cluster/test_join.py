"""Start of a distributed run in which one process is lost."""

import subprocess
import sys

from support.ports import free_port

# The roll call is skipped, as the lost process had passed it.
LOST_BEFORE_JAX = """
from noloco_jax.cluster import join
from noloco_jax.cluster.place import Place

join.call_the_roll, join.CONNECT_SECONDS = (lambda *_: None), 2
with join.joined(Place("localhost:{port}", 2, 0), {{}}, timeout=2):
    print("trained")
"""


def test_a_process_lost_before_jax_connects_ends_the_others_with_status_1():
    """By itself, JAX would abort them with a signal."""
    program = LOST_BEFORE_JAX.format(port=free_port())
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("error: JAX ended this process")
    assert "trained" not in ended.stdout
