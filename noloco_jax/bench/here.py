"""The process of one variant."""

import json
from pathlib import Path

import jax

from noloco_jax.bench.measure import measure
from noloco_jax.bench.options import FAILED, REFUSED, Options
from noloco_jax.cluster.host import use_cpu_cores, use_gpu_memory
from noloco_jax.config import TrainConfig
from noloco_jax.errors import UserError
from noloco_jax.files import write_whole


def measure_here(config: TrainConfig, options: Options, path: Path) -> int:
    """Measures in this process; writes the result, or why there is none, as JSON, and returns the exit status."""
    use_gpu_memory()
    use_cpu_cores(config)
    try:
        result, status = measure(config, options), 0
    except UserError as error:
        result, status = {"error": str(error)}, REFUSED
    except (jax.errors.JaxRuntimeError, MemoryError) as error:  # the device's memory, first of all
        result, status = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}, FAILED
    write_whole(path, json.dumps(result))
    return status
