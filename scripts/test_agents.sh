#!/usr/bin/env bash
# Runs agents written for other frameworks and environments, each under a Python of its own.
#   scripts/test_agents.sh [pytest arguments]
# The environments (examples/*/.venv) are built once and kept.
set -euo pipefail
cd "$(dirname "$0")/.."

export PYTHON="${PYTHON:-$PWD/.venv/bin/python}" PENSTOCK_TEST_AGENTS=1
for requirements in examples/*/requirements.txt; do
    examples/setup.sh "$(basename "$(dirname "$requirements")")"
done
exec "$PYTHON" -m pytest tests/agent/test_frameworks.py -p no:cacheprovider "$@"
