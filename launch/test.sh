#!/usr/bin/env bash
# Installs what the tests need and runs the default tests, with style and types at the same time.
#   bash launch/test.sh                      what CI runs
#   bash launch/test.sh style                only style and types
#   bash launch/test.sh -m unit              the fast tests; further arguments go to pytest
#   bash launch/test.sh -n 0 tests/optim     one folder, sequentially in one process
# Another interpreter and environment: PYTHON=python3.12 VENV=.venv312 bash launch/test.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/install.sh
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the same modules

style() {
    "$python" -m ruff check . && "$python" -m ruff format --check . && "$python" -m pyright --pythonpath "$python"
}

install test
if [ "${1:-}" = style ]; then
    style
    exit
fi
probe=$("$python" tests/probe.py)
report=$(mktemp)
trap 'rm -f "$report"' EXIT
style >"$report" 2>&1 &
styled=$!
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
failed=0
TIMEFORMAT="%R s; CPU seconds: %U and %S of the system, children included; of the probe (tests/probe.py): $probe"
time "$python" -m pytest -n $((cores * 3 / 2)) --maxprocesses=8 "$@" || failed=$?
wait "$styled" || { cat "$report" && failed=1; }
exit "$failed"
