"""Every test sees eight CPU devices and strict broadcasting; set in the environment so that child processes do too."""

import os
import sys

assert "jax" not in sys.modules, "jax read its environment before the tests could set it"

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests compile much and compute little: code of the least optimisation is ready in half the time.
XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *XLA_FLAGS]).strip()
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # a cache would hide what a test compiles
