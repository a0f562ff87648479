# The two commands of the README, and what maintainers run. Each sets up what it needs in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: checkup test lint setup
setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml tools/setup.sh
	PYTHON=$(PYTHON) bash tools/setup.sh $(VENV)

test: setup
	$(BIN)/pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
