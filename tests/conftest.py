"""Every test sees eight CPU devices and strict broadcasting; set in the environment so that child processes do too."""

import os
import sys

assert "jax" not in sys.modules, "jax read its environment before the tests could set it"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # a cache would hide what a test compiles
