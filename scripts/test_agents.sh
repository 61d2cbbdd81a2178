#!/usr/bin/env bash
# Runs agents written for other frameworks and environments, each under a Python of its own.
#   scripts/test_agents.sh [pytest arguments]
# The environments (examples/*/.venv, .venv-games, .venv-mcp, .venv-tinker) are built once and kept.
set -euo pipefail
cd "$(dirname "$0")/.."

export PYTHON="${PYTHON:-$PWD/.venv/bin/python}" PENSTOCK_TEST_AGENTS=1
for requirements in examples/*/requirements.txt; do
    examples/setup.sh "$(basename "$(dirname "$requirements")")"
done
games="${GAMES_VENV:-.venv-games}"
if [ ! -f "$games/.ready" ]; then
    "$PYTHON" -m venv --clear "$games"
    "$games/bin/pip" install --quiet textarena==0.7.4 skyrl-gym==0.4.0 numpy pydantic rich
    "$games/bin/pip" install --quiet gem-llm==0.1.0 || echo "gem-llm is not offered for this Python"
    touch "$games/.ready"
fi
export PENSTOCK_TEST_GAMES="$PWD/$games/bin/python"
servers="${MCP_VENV:-.venv-mcp}"
if [ ! -f "$servers/.ready" ]; then
    "$PYTHON" -m venv --clear "$servers"
    "$servers/bin/pip" install --quiet mcp==2.3.0 mcp-server-time==2026.10.19
    touch "$servers/.ready"
fi
export PENSTOCK_TEST_MCP="$PWD/$servers/bin"
tinker="${TINKER_VENV:-.venv-tinker}"
if [ ! -f "$tinker/.ready-0.5.8" ]; then
    "$PYTHON" -m venv --clear "$tinker"
    torch="torch==$("$PYTHON" -c 'from importlib.metadata import version; print(version("torch"))')"
    "$tinker/bin/pip" install --quiet --no-compile tinker==0.36.0 tinker-cookbook==0.5.8 "$torch" math-verify pylatexenc sympy \
        && touch "$tinker/.ready-0.5.8" || echo "the Tinker SDK and its cookbook are not offered for this Python"
fi
[ ! -f "$tinker/.ready-0.5.8" ] || export PENSTOCK_TEST_TINKER="$PWD/$tinker/bin/python"
exec "$PYTHON" -m pytest tests/promises/agents/test_frameworks.py tests/service/test_sdk.py tests/service/test_recipes.py \
    -p no:cacheprovider "$@"
