# The README's two commands are `make checkup` and `make test`; each sets up what it needs in .venv.
# `make test-vllm` uses an environment of its own, outside the tree, with a real vLLM for CPU.
# It draws the same cases each time; ULLAGE_VLLM_SEED=random (or a number) draws others.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: checkup test test-slow test-vllm lint format setup

checkup: setup
	$(BIN)/ullage checkup "$$($(BIN)/python tools/smollm2_path.py)" --save checkup

test: setup
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile -m "not slow and not vllm"

test-slow: setup
	$(BIN)/pytest -n 2 --dist loadfile -m "slow and not vllm"

test-vllm: setup
	bash tools/vllm_setup.sh
	$(BIN)/pytest -m vllm --timeout 3000 tests/vllm tests/launch tests/adapters/test_live_vllm.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml tools/setup.sh
	PYTHON=$(PYTHON) bash tools/setup.sh $(VENV)
