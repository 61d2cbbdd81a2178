#!/usr/bin/env bash
# Builds the wheel, installs it with its dependencies into a new environment, and trains there.
#   scripts/test_wheel.sh         PYTHON names the Python; the wheel stays in dist/
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-.venv/bin/python}"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
rm -rf dist
"$python" -m pip wheel --quiet --no-deps --no-build-isolation -w dist .
rm -rf build
"$python" -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
if uv="$(command -v uv)"; then
    "$uv" venv --quiet --python "$scratch/venv/bin/python" "$scratch/uv"
    "$uv" pip install --quiet --python "$scratch/uv/bin/python" -c constraints.txt dist/*.whl
    "$scratch/uv/bin/penstock" --version
else
    echo "test-wheel: uv is not installed here: only pip was tried"
fi
cd "$scratch" # not in the repository: what runs is the wheel
export XDG_CONFIG_HOME="$scratch/config" PYTHONPATH=
export HF_HUB_OFFLINE=1 http_proxy=http://127.0.0.1:9 https_proxy=http://127.0.0.1:9 # no network from here on
"$scratch/venv/bin/penstock" --version
"$scratch/venv/bin/penstock" train train.steps=2 eval.max_problems=8 run.name=wheel
"$scratch/venv/bin/penstock" resume wheel train.steps=3
"$scratch/venv/bin/penstock" audit wheel
"$scratch/venv/bin/penstock" report wheel
