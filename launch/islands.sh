#!/usr/bin/env bash
# Trains N islands on this machine, which meet over TLS as they would between machines (noloco_jax/islands/local.py):
#
#     bash launch/islands.sh 4 --config=configs/quickstart.py --workdir=runs/islands
#
# PYTHON chooses the interpreter.
python=${PYTHON:-$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
exec "$python" -m noloco_jax.island local "$@"
