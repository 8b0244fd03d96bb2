#!/usr/bin/env bash
# Installs what the tests need and runs all of them: style, types, tests. Further arguments go to pytest.
# Another interpreter and environment: PYTHON=python3.12 VENV=.venv312 bash launch/test.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/install.sh

install test
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m pyright --pythonpath "$python"
"$python" -m pytest "$@"
