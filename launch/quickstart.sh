#!/usr/bin/env bash
# Installs noloco_jax into .venv and trains a small model with NoLoCo, on a GPU if there is one. Further arguments go to
# the trainer: bash launch/quickstart.sh --config.num_steps=1000
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/install.sh

if nvidia-smi >/dev/null 2>&1; then
    install cuda12
else
    install
fi
exec "$python" -m noloco_jax.train --config=configs/quickstart.py --workdir=runs/quickstart "$@"
