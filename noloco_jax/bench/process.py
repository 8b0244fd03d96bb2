"""A process for each variant: it may need other CPU devices, and its peak memory is its own."""

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import jax

from noloco_jax.bench.measure import Options, Result, measure
from noloco_jax.bench.variants import Variant
from noloco_jax.cluster.host import keep_freed_memory, use_cpu_cores, use_gpu_memory
from noloco_jax.config import TrainConfig
from noloco_jax.errors import UserError
from noloco_jax.files import write_whole

FAILED, REFUSED = 1, 2  # exit statuses


def measure_here(config: TrainConfig, options: Options, path: Path) -> int:
    """Measures in this process; writes the result, or why there is none, as JSON, and returns the exit status."""
    keep_freed_memory()
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


def measure_apart(file: str, variant: Variant, options: Options) -> Result:
    """Measures a variant of a config file in a new process; of one that fails, the result has `error` and `status`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [
            *(sys.executable, "-m", "noloco_jax.bench", f"--config={file}", *variant.overrides),
            *(f"--steps={options.steps}", f"--data_seconds={options.data_seconds}", f"--result={path}"),
            *(["--compile_only"] if options.compile_only else []),
            *([f"--profile={options.profile}"] if options.profile else []),
        ]
        status = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
        if path.exists():
            result = json.loads(path.read_text(encoding="utf-8"))
            return result | ({"status": status} if "error" in result else {})
    if status < 0:
        return {"error": f"its process was ended by {signal.Signals(-status).name}", "status": FAILED}
    return {"error": f"its process ended with status {status}, see above", "status": FAILED}
