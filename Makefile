PYTHON ?= python3

.PHONY: demo test fast lint env

demo: env  ## Train a tiny model on this machine: SFT, then RL with a verifier
	.venv/bin/openrlhf demo

test: env  ## All tests
	.venv/bin/pytest

fast: env  ## The tests that take seconds
	.venv/bin/pytest -m "not e2e"

lint: env  ## Style, types and import layers
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyrefly check
	.venv/bin/lint-imports

env:
	@$(PYTHON) tools/environment.py
