"""Freed memory that a process on the CPU keeps, by the pages that it has to fetch from the kernel."""

import os
import platform
import subprocess
import sys

import pytest

from support.paths import ROOT

KEEP = "from noloco_jax.cluster.heap import keep_freed_memory; keep_freed_memory()"

# A thread that has begun and ended leaves an arena, where it may have one of its own. Then another thread allocates,
# fills and frees 256 MiB, and prints how many pages the second time had to fetch.
PAGES_FETCHED_AGAIN = """
import resource, threading
{first}
import numpy as np

def pages_fetched() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def twice():
    np.ones(2**25)
    before = pages_fetched()
    np.ones(2**25)
    print(pages_fetched() - before)

for run in (lambda: bytes(100_000), twice):
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
"""

# Runs a command until it settles what is kept, and prints what was imported by then that starts threads.
FIRST = """
import os, runpy, sys
from noloco_jax.cluster import heap

def keep():
    print([name for name in ("numpy", "jax", "pyarrow", "grain") if name in sys.modules])
    sys.stdout.flush()
    os._exit(0)

heap.keep_freed_memory = keep
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def pages_fetched_again(first: str, **environment: str) -> int:
    program = PAGES_FETCHED_AGAIN.format(first=first)
    run = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return int(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators than glibc's are left as they are")
def test_memory_that_a_thread_once_freed_is_used_again_without_the_kernel():
    kept, handed_back = (pages_fetched_again(first) for first in (KEEP, ""))
    assert kept < 100 < handed_back


def test_where_gpus_may_train_freed_memory_is_left_to_the_allocator():
    assert pages_fetched_again(KEEP, JAX_PLATFORMS="cuda") > 100


@pytest.mark.parametrize(
    "command",
    [
        ["noloco_jax.train", "--config=configs/quickstart.py", "--workdir={tmp}/run"],
        ["noloco_jax.bench", "--config=configs/quickstart.py", "--result={tmp}/result"],
        [
            *("noloco_jax.island", "train", "--config=configs/quickstart.py", "--workdir={tmp}/run"),
            *("--roster={tmp}/roster.toml", "--name=paris"),
        ],
    ],
    ids=["train", "bench", "island"],
)
def test_what_trains_settles_it_before_anything_starts_threads(command, tmp_path):
    of = '\n[[island]]\nname = "{}"\naddress = "127.0.0.1:{}"\n'
    islands = of.format("paris", 1) + of.format("rome", 2)
    (tmp_path / "roster.toml").write_text(f'run = "c4"\n{islands}')
    arguments = [part.format(tmp=tmp_path) for part in command]
    run = subprocess.run(
        [sys.executable, "-c", FIRST, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.stdout == "[]\n", run.stderr
