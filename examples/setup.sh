#!/usr/bin/env bash
# Installs what an example needs into an environment of its own, examples/NAME/.venv:
#   examples/setup.sh frameworks
# PYTHON names the Python to build it with (python3).
set -euo pipefail
cd "$(dirname "$0")/${1:?name a folder of examples/ that has a requirements.txt}"

wanted="$(sha256sum requirements.txt)"
if [ "$(cat .venv/.ready 2>/dev/null)" != "$wanted" ]; then
    "${PYTHON:-python3}" -m venv --clear .venv
    .venv/bin/pip install --quiet --no-compile --requirement requirements.txt
    echo "$wanted" >.venv/.ready
fi
