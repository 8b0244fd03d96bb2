#!/usr/bin/env bash
# `post_finalization_callback` of Orbax's v1 `AsyncOptions`, "a function that is called after the async save operation is
# complete", is never called by `v1.save_async` and `v1.save_checkpointables_async`, without an error or a warning.
# `v1.training.Checkpointer` calls it, with the same context.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 orbax-checkpoint==0.12.8 numpy==2.4.6
cat >"$folder/save.py" <<'PYTHON'
import importlib.metadata
import sys
from pathlib import Path

import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

folder, calls, state = Path(sys.argv[1]), [], {"weights": jnp.ones(8)}
with ocp.Context(async_options=ocp.options.AsyncOptions(post_finalization_callback=lambda: calls.append("called"))):
    ocp.save_async(folder / "state", state).result()
    ocp.save_checkpointables_async(folder / "items", {"state": state}).result()
    by_functions = len(calls)
    with ocp.training.Checkpointer(folder / "training") as checkpointer:
        checkpointer.save_async(1, state)
    by_checkpointer = len(calls) - by_functions
print(f"orbax {importlib.metadata.version('orbax-checkpoint')}: two saves by functions called it {by_functions} times, ", end="")
print(f"one by training.Checkpointer {by_checkpointer} times")
sys.exit((by_functions, by_checkpointer) != (0, 1))
PYTHON
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/save.py" "$folder" 2>"$folder/log" || { cat "$folder/log" && exit 1; }
