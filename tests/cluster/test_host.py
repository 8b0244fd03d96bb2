"""CPU devices, GPU memory limits as JAX's client reads them, and freed memory that a CPU process keeps."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options

from noloco_jax.cluster.host import find_devices, num_cpu_devices, use_cpu_cores, use_gpu_memory
from noloco_jax.config import MeshConfig, OuterConfig, TrainConfig
from noloco_jax.cores import usable_memory
from noloco_jax.errors import UserError
from noloco_jax.spmd.background import training_devices
from support.paths import ROOT
from support.platforms import EIGHT_CPUS

HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
KEEP = "from noloco_jax.cluster.host import keep_freed_memory; keep_freed_memory()"

# The first thread leaves a malloc arena behind, unless all threads share one. The second thread allocates, fills and
# frees 256 MiB twice, and prints the page faults of the second time.
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

# Runs a command until it calls keep_freed_memory, and prints the thread-starting modules imported by then.
IMPORTED_BEFORE_KEEP = """
import os, runpy, sys
from noloco_jax.cluster import host

def keep():
    print([name for name in ("numpy", "jax", "pyarrow", "grain") if name in sys.modules])
    sys.stdout.flush()
    os._exit(0)

host.keep_freed_memory = keep
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def printed(program: str, **environment: str) -> int:
    """Run a Python program and return the number it prints."""
    run = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return int(run.stdout)


@pytest.mark.parametrize(
    ("mesh", "num_replicas", "cores", "num_processes", "expected"),
    [
        (MeshConfig(), 8, 4, 1, 4),
        (MeshConfig(), 6, 5, 1, 3),  # 5 and 4 do not divide 6
        (MeshConfig(), 7, 4, 1, 1),
        (MeshConfig(fsdp=2), 4, 5, 1, 4),  # two cores a replica, room for two
        (MeshConfig(replica=2, fsdp=-1), 4, 7, 1, 6),
        (MeshConfig(replica=2, tensor=3), 4, 1, 1, 6),  # an explicit mesh, however few the cores
        (MeshConfig(), 8, 4, 4, 1),
        (MeshConfig(replica=2, fsdp=3), 4, 4, 4, 2),  # 6 devices of 4 processes
    ],
)
def test_a_process_makes_as_many_devices_as_mesh_cores_and_replicas_allow(
    mesh, num_replicas, cores, num_processes, expected
):
    assert num_cpu_devices(mesh, num_replicas, cores, num_processes) == expected


def test_jax_has_the_devices_that_the_cores_allow():
    program = """
import os
os.sched_getaffinity = lambda pid: range(5)
import jax
from noloco_jax.cluster.host import use_cpu_cores
from noloco_jax.config import MeshConfig
use_cpu_cores(MeshConfig(), num_replicas=6)
print(jax.local_device_count())
"""
    assert printed(program, XLA_FLAGS="") == 3


@pytest.fixture
def updates(monkeypatch) -> list[tuple[str, int]]:
    """Return the updates of JAX's configuration that a test makes, in an environment that sets no number of devices."""
    jax.devices()  # the tests' own, made before their number is left out
    made: list[tuple[str, int]] = []
    monkeypatch.setattr(jax, "config", SimpleNamespace(update=lambda name, value: made.append((name, value))))
    monkeypatch.setenv("XLA_FLAGS", "")
    return made


def test_the_number_of_cpu_devices_that_the_environment_sets_is_kept(updates, monkeypatch):
    for name, value in {"XLA_FLAGS": EIGHT_CPUS, "JAX_NUM_CPU_DEVICES": "3"}.items():
        with monkeypatch.context() as environment:
            environment.setenv(name, value)
            use_cpu_cores(MeshConfig(replica=2), 2)
    assert updates == []
    use_cpu_cores(MeshConfig(replica=2), 2)
    assert updates == [("jax_num_cpu_devices", 2)]


@pytest.mark.parametrize(("method", "count"), [("noloco", 8), ("ddp", 4)])
def test_delayed_exchanges_double_the_number_of_cpu_devices(updates, method, count):
    """A method without outer steps ignores the delay."""
    config = TrainConfig(method=method, outer=OuterConfig(sync_every=5, delay=2), mesh=MeshConfig(replica=4))
    use_cpu_cores(config.mesh, config.num_replicas, config.delay)
    assert updates == [("jax_num_cpu_devices", count)]
    assert len(training_devices(config.delay, config.mesh, jax.devices()[:count])) == 4


@pytest.fixture
def no_limits_set(monkeypatch):
    for name in (HOST_LIMIT, *FRACTIONS):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)


def test_default_limits_allow_most_gpu_memory_and_all_host_memory(no_limits_set):
    use_gpu_memory()
    assert generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.92
    assert int(os.environ[HOST_LIMIT]) == usable_memory() // 2**30


@pytest.mark.parametrize("name", FRACTIONS)
def test_memory_limits_set_in_the_environment_are_kept(monkeypatch, no_limits_set, name):
    monkeypatch.setenv(name, "0.5")
    monkeypatch.setenv(HOST_LIMIT, "7")
    use_gpu_memory()
    assert generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.5
    assert os.environ[HOST_LIMIT] == "7"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators than glibc's are left as they are")
def test_memory_freed_by_a_thread_is_reused_without_page_faults():
    kept, handed_back = (printed(PAGES_FETCHED_AGAIN.format(first=first)) for first in (KEEP, ""))
    assert kept < 100 < handed_back


def test_freed_memory_is_not_kept_where_gpus_may_train():
    assert printed(PAGES_FETCHED_AGAIN.format(first=KEEP), JAX_PLATFORMS="cuda") > 100


@pytest.mark.parametrize(
    "command",
    [
        ["noloco_jax.train", "--config=configs/quickstart.py", "--workdir={tmp}/run"],
        [
            *("noloco_jax.island", "train", "--config=configs/quickstart.py", "--workdir={tmp}/run"),
            *("--roster={tmp}/roster.toml", "--name=paris"),
        ],
    ],
    ids=["train", "island"],
)
def test_training_commands_keep_freed_memory_before_importing_threaded_modules(command, tmp_path):
    of = '\n[[island]]\nname = "{}"\naddress = "127.0.0.1:{}"\n'
    islands = of.format("paris", 1) + of.format("rome", 2)
    (tmp_path / "roster.toml").write_text(f'run = "c4"\n{islands}')
    arguments = [part.format(tmp=tmp_path) for part in command]
    run = subprocess.run(
        [sys.executable, "-c", IMPORTED_BEFORE_KEEP, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert run.stdout == "[]\n", run.stderr


@pytest.mark.parametrize(
    ("line", "file", "text", "expected"),
    [
        ("0::/job/step", "sys/fs/cgroup/job/memory.max", "4096", 4096),  # of the group above
        ("0::/job/step", "sys/fs/cgroup/job/memory.max", "max", None),
        ("0::/", "sys/fs/cgroup/memory.max", "8192", 8192),  # inside a container
        ("4:memory:/job", "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "4096", 4096),
        ("3:cpuset:/job", "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "4096", None),
    ],
)
def test_usable_memory_is_what_the_control_groups_leave_of_the_machines(tmp_path, line, file, text, expected):
    for path, content in (("proc/self/cgroup", line), (file, text)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content + "\n")
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert usable_memory(tmp_path) == (physical if expected is None else expected)
    assert usable_memory(tmp_path / "nowhere") == physical


@pytest.mark.parametrize(
    ("platform", "line"),
    [
        ("cuda", "error: JAX_PLATFORMS=cuda cannot be used here (JAX finds no such device)"),
        ("nosuch", "error: JAX_PLATFORMS=nosuch cannot be used here (RuntimeError: Unable to init"),
    ],
)
def test_a_platform_that_is_not_here_is_named_in_one_line(platform, line, tmp_path):
    if platform == "cuda" and Path("/dev/nvidiactl").exists():
        pytest.skip("a GPU is here")
    command = [sys.executable, "-m", "noloco_jax.train", "--config=configs/quickstart.py", f"--workdir={tmp_path}/run"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    environment = inherited | {"JAX_PLATFORMS": platform}
    done = subprocess.run([*command, "--dry_run"], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (told,) = [one for one in done.stderr.splitlines() if not one.startswith("WARNING:")]
    assert told.startswith(line)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("XLA_FLAGS", "--xla_nosuch=1", "^XLA_FLAGS has flags that XLA does not know: --xla_nosuch=1; correct"),
        ("JAX_NUMPY_DTYPE_PROMOTION", "strict", "^JAX_NUMPY_DTYPE_PROMOTION=strict is set, and the programs"),
        ("JAX_TRANSFER_GUARD", "disallow", "^JAX_TRANSFER_GUARD=disallow is set, and batches"),
        ("JAX_ENABLE_X64", "True", "^JAX_ENABLE_X64=True is set, and the programs compute in 32 bits"),
    ],
)
def test_a_variable_that_stops_the_programs_is_named(name, value, message, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        find_devices()
