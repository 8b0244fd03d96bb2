"""The launcher: a process for each variant, as it may need other CPU devices, and its peak memory is its own."""

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from noloco_jax.bench.options import FAILED, Options, Result
from noloco_jax.bench.variants import Variant


def launch(file: str, variant: Variant, options: Options) -> Result:
    """Measure a variant of a config file in a new process; of one that fails, the result has `error` and `status`."""
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
