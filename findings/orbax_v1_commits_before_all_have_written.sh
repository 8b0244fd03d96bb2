#!/usr/bin/env bash
# `save_checkpointables_async` of Orbax's v1 interface renames a checkpoint to its final name as soon as process 0 has
# written its part: the folder that another process still writes to is gone, and its file fails (or is missing later).
# Arrays alone wait for all processes; a stateful checkpointable that writes a file per process does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 orbax-checkpoint==0.12.8 numpy==2.4.6

cat >"$folder/save.py" <<'PYTHON'
import asyncio
import importlib.metadata
import sys
from pathlib import Path

import jax

index, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
from orbax.checkpoint import v1 as ocp


class DataIterator:
    """Saves the position of each process in a file of its own; that of process 1 takes a second longer."""

    missing = None

    async def save(self, directory):
        async def write():
            place = Path(await directory.await_creation()) / f"process_{index}.json"
            await asyncio.sleep(index)
            try:
                place.write_text("{}")
            except FileNotFoundError:
                self.missing = place

        return write()

    async def load(self, directory):
        raise NotImplementedError


data = DataIterator()
ocp.save_checkpointables_async(folder / "checkpoint", {"data": data}).result()
files = sorted(path.name for path in (folder / "checkpoint/data").iterdir())
if index == 1:
    versions = f"orbax {importlib.metadata.version('orbax-checkpoint')}, jax {jax.__version__}"
    gone = f"{data.missing.parent.parent.name}/ was gone" if data.missing else "wrote in time"
    print(f"{versions}: saved without an error, with {files}; process 1: {gone}")
    sys.exit(files != ["process_0.json"] or data.missing is None)
PYTHON
port=$("$folder/venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export JAX_PLATFORMS=cpu
"$folder/venv/bin/python" "$folder/save.py" 0 "$port" "$folder" >"$folder/log0" 2>&1 &
"$folder/venv/bin/python" "$folder/save.py" 1 "$port" "$folder" >"$folder/log1" 2>&1 || { cat "$folder/log1" && exit 1; }
wait $! || { cat "$folder/log0" && exit 1; }
grep "^orbax" "$folder/log1"
