#!/usr/bin/env bash
# Installs what the tests need, and runs the default tests; style and types beside them, as they take a minute of one core.
# Three workers for two cores, up to eight: a sixth of the time of a test is spent waiting.
#   bash launch/test.sh                      what CI runs
#   bash launch/test.sh style                style and types alone
#   bash launch/test.sh -m unit              further arguments go to pytest: the fast tests alone
#   bash launch/test.sh -n 0 tests/outer     one folder, one test after the other in one process
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
