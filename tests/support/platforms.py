"""Platform of the tests: eight forced CPU devices or, with `-m gpu`, the GPUs that JAX finds.

XLA's flags for the CPU are of programs that compile soonest: tests compile much and compute little.
"""

import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

EIGHT_CPUS = "--xla_force_host_platform_device_count=8"
QUICK_TO_COMPILE = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",  # one module of machine code: each costs its own start
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",  # by itself 40: many devices share few, busy cores
]
if version("jaxlib").startswith("0.10."):
    # Its older code generator compiles these programs in a third of the time. Later releases have only the newer one.
    QUICK_TO_COMPILE.append("--xla_cpu_use_fusion_emitters=false")

PROGRAMS = "NOLOCO_JAX_TEST_PROGRAMS"

_ON_GPUS = {
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",  # not TF32, whose rounding no test allows for
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # several processes share the GPUs
}
_GPU_FLAGS = ["--xla_gpu_deterministic_ops=true"]  # equal to the bit, from one run to the next


def use_cpu() -> None:
    """Settles this process's environment: eight CPU devices, whatever other platforms there are."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    _settle([EIGHT_CPUS, *QUICK_TO_COMPILE])


def use_gpus() -> None:
    """Settles this process's environment: the GPUs, with eight CPU devices beside them for what is compared.

    JAX_PLATFORMS=cpu, given from outside, rehearses the same tests on the CPU.
    """
    for name, value in _ON_GPUS.items():
        os.environ.setdefault(name, value)
    _settle([EIGHT_CPUS, *_GPU_FLAGS])


def _settle(xla_flags: list[str]) -> None:
    own = os.environ.get("XLA_FLAGS", "").split()
    names = {flag.partition("=")[0] for flag in own}
    os.environ["XLA_FLAGS"] = " ".join([*own, *(flag for flag in xla_flags if flag.partition("=")[0] not in names)])
    os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # a cache would hide what a test compiles


def of_a_run(num_cpus: int) -> dict[str, str]:
    """The variables of a process of a run: so many CPU devices, or the GPUs that this process uses."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        flags = [f"--xla_force_host_platform_device_count={num_cpus}", *QUICK_TO_COMPILE]
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    return {name: os.environ[name] for name in _ON_GPUS} | {"XLA_FLAGS": " ".join(_GPU_FLAGS)}


def share_programs() -> None:
    """Make the compilation cache of a session's runs, in all its workers, which inherit the variable that names it."""
    os.environ[PROGRAMS] = tempfile.mkdtemp(prefix="noloco_jax_programs_")


def forget_programs() -> None:
    shutil.rmtree(os.environ.pop(PROGRAMS), ignore_errors=True)


def programs(folder: Path) -> str:
    """Return the compilation cache of runs: the session's, or outside of a session one in the folder."""
    return os.environ.get(PROGRAMS) or str(folder / "programs")


def missing() -> str:
    """Return why the tests of `-m gpu` cannot run here, or an empty text."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return ""
    import jax

    try:
        for platform in ("gpu", "cpu"):
            jax.devices(platform)
    except RuntimeError as error:
        return (
            f"-m gpu needs a GPU and CPU devices ({error}): install jax[cuda12] or jax[cuda13], give no JAX_PLATFORMS "
            "or cuda,cpu, or rehearse with JAX_PLATFORMS=cpu"
        )
    return ""
