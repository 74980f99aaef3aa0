PYTHON ?= python3
PARALLEL ?= -n 2 --dist loadfile  # two processes, each with whole files: many tests keep one core busy

.PHONY: demo test fast lint env

demo: env  ## Train a tiny model on this machine: SFT, then RL with a verifier
	.venv/bin/openrlhf demo

test: env  ## All tests
	.venv/bin/pytest $(PARALLEL)

fast: env  ## The tests that take seconds
	.venv/bin/pytest $(PARALLEL) -m "not e2e"

lint: env  ## Style, types and import layers
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyrefly check
	.venv/bin/lint-imports

env:
	@$(PYTHON) tools/environment.py
