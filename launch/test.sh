#!/usr/bin/env bash
# Installs what the tests need and runs all of them: style, types, and the tests with a process a core, up to eight.
# Further arguments go to pytest: `-m unit` for the fast ones alone, `-n 0` for one after the other in one process.
# Another interpreter and environment: PYTHON=python3.12 VENV=.venv312 bash launch/test.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/install.sh

install test
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m pyright --pythonpath "$python"
"$python" -m pytest -n auto --maxprocesses=8 "$@"
