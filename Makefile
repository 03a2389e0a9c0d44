# Targets are relative paths, so that a checkout in a folder with spaces in its name works.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all lint types format tensorboard clean

help: ## print this list
	@echo 'make TARGET, where TARGET is one of:'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' Makefile | awk -F '|' '{ printf "%-14s %s\n", $$1, $$2 }'

setup: $(STAMP) ## make .venv with the tested versions; PYTHON=... picks another interpreter

# The stamp goes first and comes back last: an install that fails leaves none. A .venv without pip is half made.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
			echo 'Fulgurite needs Python 3.11 or newer, which "$(PYTHON)" is not: make setup PYTHON=/path/to/python3.11' >&2; exit 1; }; \
		"$(PYTHON)" -m venv --clear .venv; \
	fi
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@touch $@

train: setup ## train on the built-in digits, then test the best checkpoint
	$(BIN)/fulgurite fit -c configs/experiment/digits.yaml --test true

test: setup lint types ## lint, types and every test but the slow ones
	$(BIN)/python -m pytest -m 'not slow'

test-all: setup lint types ## lint, types and every test
	$(BIN)/python -m pytest

lint: setup ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: setup ## mypy
	$(BIN)/mypy

format: setup ## mend what ruff can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

tensorboard: setup ## show runs/ in TensorBoard
	$(BIN)/tensorboard --logdir runs

clean: ## remove caches and build outputs; runs/ and .venv stay
	rm -rf build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
