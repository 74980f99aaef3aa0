PYTHON ?= python3
PARALLEL ?= -n 2 --dist loadfile  # two processes, each with whole files: many tests keep one core busy

.PHONY: demo test test-all fast lint env

demo: env  ## Train a tiny model on this machine: SFT, then RL with a verifier
	.venv/bin/openrlhf demo

test: env  ## Every guarantee, in a quarter of an hour
	.venv/bin/pytest $(PARALLEL) -m "not slow"

test-all: env  ## The same and the exhaustive variants
	.venv/bin/pytest $(PARALLEL)

fast: env  ## The tests that take seconds
	.venv/bin/pytest $(PARALLEL) -m "not e2e and not slow"

lint: env  ## Style, types and import layers
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyrefly check
	.venv/bin/lint-imports

env:
	@$(PYTHON) tools/environment.py
