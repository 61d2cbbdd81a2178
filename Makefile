# Everything a newcomer or CI needs. Each target sets itself up from nothing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

.PHONY: demo test tests test-long test-ray test-simulation test-fuzz test-gpu test-vllm test-agents test-wheel docs release-check check format clean help

help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

# only files whose SHA-256 is known; pinned, because an open range may pull gigabytes of GPU packages
$(STAMP): pyproject.toml constraints.txt hashes.txt
	$(PYTHON) scripts/check_python.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); about two minutes"
	$(BIN)/python scripts/locked_install.py
	touch $@

$(DEV_STAMP): $(STAMP)
	@echo "installing what the tests need; about a minute"
	$(BIN)/python scripts/locked_install.py dev compare
	touch $@

demo: $(STAMP)  ## install and train the small policy on this machine's CPU (about a minute)
	$(BIN)/penstock train

check: $(DEV_STAMP)  ## format, lint and types
	$(BIN)/ruff format --check src tests benchmarks scripts examples
	$(BIN)/ruff check src tests benchmarks scripts examples
	$(BIN)/mypy

# compile each file once for all the processes that the tests start, whatever the environment says
export PYTHONDONTWRITEBYTECODE :=

# one file stays in one process; tests/conftest.py puts the longest files first
PROCESSES := 2
PYTEST = $(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder --durations=15

test: $(DEV_STAMP)  ## format, lint and types, beside every quick test that needs no Ray cluster and no vLLM
	$(MAKE) --no-print-directory -j 2 check tests

tests: PROCESSES := 3  # on two cores: a quarter of these tests' time is waiting
tests: $(DEV_STAMP)
	$(PYTEST) -m "not ray and not slow"

PART ?= 1/1

test-long: $(DEV_STAMP)  ## the long sweeps: more algorithms, examples and load; PART=2/3 for the second third
	$(PYTEST) -m "slow and not ray" --part $(PART)

test-ray: $(DEV_STAMP)  ## the tests that start Ray clusters; PART=2/3 for the second third
	$(PYTEST) -m ray --part $(PART)

test-gpu: $(DEV_STAMP)  ## the tests that need a GPU, or run on a stand-in without one
	@if $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; \
	then $(BIN)/python -m pytest -m gpu --durations=15; \
	else echo "test-gpu: no GPU is visible here: nothing was tested"; fi

SCHEDULES ?= 20000

test-simulation: $(DEV_STAMP)  ## 20,000 schedules of faults on virtual time; SEED=N runs one of them again
	PYTHONPATH=tests:tests/promises $(BIN)/python -m simulation $(if $(SEED),--seed $(SEED),--schedules $(SCHEDULES) --processes 0)

CASES ?= 50000

test-fuzz: $(DEV_STAMP)  ## 50,000 hostile replies to the judge and requests to the server; CASES=N for another number
	PENSTOCK_FUZZ_CASES=$(CASES) $(BIN)/python -m pytest tests/reward/sandbox/test_fuzz.py

test-vllm: $(STAMP)  ## the engine contract against a real vLLM on the CPU, in an environment of its own
	PYTHON=$(abspath $(BIN))/python scripts/test_vllm.sh

test-agents: $(DEV_STAMP)  ## agents in real frameworks and environments, each in an environment of its own
	PYTHON=$(abspath $(BIN))/python scripts/test_agents.sh

test-wheel: $(STAMP)  ## build the wheel, install it into a new environment, train there
	PYTHON=$(abspath $(BIN))/python scripts/test_wheel.sh

docs: $(STAMP)  ## build the site of the documentation into build/docs/site; a link that leads nowhere fails
	$(BIN)/python scripts/build_docs.py

release-check: test-wheel  ## what a release needs: version, changelog, wheel, sdist, metadata, an install without a network
	$(BIN)/python scripts/release_check.py

format: $(DEV_STAMP)  ## format the code; update the picture of the packages in CONTRIBUTING.md
	$(BIN)/ruff format src tests benchmarks scripts examples
	$(BIN)/ruff check --fix src tests benchmarks scripts examples
	$(BIN)/python scripts/draw_house.py --write

clean:  ## remove environments and caches
	rm -rf build dist $(VENV) .venv-vllm .venv-games .venv-mcp .venv-tinker examples/*/.venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
