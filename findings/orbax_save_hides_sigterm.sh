#!/usr/bin/env bash
# A SIGTERM in the step in which an asynchronous save of Orbax ends is never heard by a loop that asks JAX at every step
# (`reached_preemption_sync_point(step)`): Orbax asks too, from its own thread and with the step of the save, and JAX
# then agrees on the number after that one, which the loop has passed. No option turns it off; without a save it works.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 orbax-checkpoint==0.12.8 numpy==2.4.6

cat >"$folder/loop.py" <<'PYTHON'
import importlib.metadata
import logging
import os
import signal
import socket
import sys
import time

import jax

logging.getLogger("absl").setLevel(logging.CRITICAL)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import v1

saver, folder = sys.argv[1:]
state = {"weights": jnp.zeros((4096, 4096))}
if saver == "CheckpointManager":
    manager = ocp.CheckpointManager(folder)
    save = lambda step: manager.save(step, args=ocp.args.StandardSave(state))
    wait = manager.wait_until_finished
elif saver == "v1.training.Checkpointer":
    checkpointer = v1.training.Checkpointer(folder)
    save, wait = lambda step: checkpointer.save_async(step, state), checkpointer.wait
else:
    save, wait = lambda step: None, lambda: None

heard = None
for step in range(1, 200):
    if step == 11:
        wait()  # the save ends in this step, and the machine is taken away
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2)
    if multihost_utils.reached_preemption_sync_point(step):
        heard = step
        break
    if step == 5:
        save(step)
versions = f"orbax {importlib.metadata.version('orbax-checkpoint')}, jax {jax.__version__}"
print(f"{versions}: SIGTERM in step 11, saved by {saver}: heard {f'at step {heard}' if heard else 'never'}", flush=True)
os._exit(heard != (11 if saver == "nothing" else None))
PYTHON

export JAX_PLATFORMS=cpu
for saver in nothing CheckpointManager v1.training.Checkpointer; do
    "$folder/venv/bin/python" "$folder/loop.py" "$saver" "$folder/$saver" 2>"$folder/log" || { cat "$folder/log" && exit 1; }
done
