#!/usr/bin/env bash
# Installs what the tests need and runs all of them: style, types, and the tests in three workers for two cores, up to
# eight, as a sixth of the time of a test is spent waiting.
# Further arguments go to pytest: `-m unit` for the fast ones alone, `-n 0` for one after the other in one process.
# Another interpreter and environment: PYTHON=python3.12 VENV=.venv312 bash launch/test.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/install.sh
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the same modules

install test
"$python" -m ruff check .
"$python" -m ruff format --check .
report=$(mktemp)
trap 'rm -f "$report"' EXIT
"$python" -m pyright --pythonpath "$python" >"$report" & # beside the tests, as it takes a minute of one core
types=$!
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
"$python" -m pytest -n $((cores * 3 / 2)) --maxprocesses=8 "$@"
wait "$types" || { cat "$report" && exit 1; }
