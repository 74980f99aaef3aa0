PYTHON ?= python3
# Two processes, for many tests keep one core busy; tests/conftest.py says what they take, and in which order.
PARALLEL ?= -n 2 --dist loadfile --no-loadscope-reorder
REPORTS = .pytest_cache/reports
# Other kernels of torch and oneDNN on the same machine, and the tests whose numbers come from them.
KERNELS ?= ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
# Pure functions, records and configuration: nothing of transformers is imported.
QUICK = tests/unit/config $(addprefix tests/unit/,$(addsuffix .py,test_types \
    $(addprefix algorithms/test_,advantages algorithms correction kl mismatch policy_loss preference_loss \
    reduce rewards token_loss traits value_loss) $(addprefix training/test_,collect credit evaluate schedule) \
    checkpoint/test_run_fingerprint data/test_balance observability/test_failures rollout/test_seeds \
    rollout/test_trajectories))
RUN_MUTANTS = PYTHONPATH=.:tests .venv/bin/python -m mutants.run
MODEL ?=
MUTANTS ?=
CHAOS ?=
NUMERIC = tests/unit $(addprefix tests/e2e/test_,invariance.py muon.py lora_training.py ema_training.py)

.PHONY: demo test test-all test-kernels mutants chaos gpu fast quick size lint docs docs-serve env

demo: env  ## Train a tiny model on this machine: SFT, then RL with a verifier; a pretrained one: MODEL=smollm2
	.venv/bin/openrlhf demo $(if $(MODEL),--model $(MODEL))

test: env  ## Every guarantee, in about 15 minutes
	.venv/bin/pytest -m "not slow" --junit-xml=$(REPORTS)/gpu.xml tests/gpu
	.venv/bin/pytest $(PARALLEL) -m "not slow and not gpu" --junit-xml=$(REPORTS)/cpu.xml
	@.venv/bin/python tools/count_tests.py $(REPORTS)/cpu.xml $(REPORTS)/gpu.xml

test-all: env  ## The same and the exhaustive variants
	.venv/bin/pytest --junit-xml=$(REPORTS)/gpu.xml tests/gpu
	.venv/bin/pytest $(PARALLEL) -m "not gpu" --junit-xml=$(REPORTS)/cpu.xml
	$(RUN_MUTANTS) --sample 12 --seed "$$(git rev-parse HEAD)"
	@.venv/bin/python tools/count_tests.py $(REPORTS)/cpu.xml $(REPORTS)/gpu.xml

test-kernels: env  ## The numeric tests under the instruction sets of other CPUs
	set -e; for kernels in $(KERNELS); do \
	    echo "$$kernels"; env $$kernels .venv/bin/pytest $(PARALLEL) -m "not slow" $(NUMERIC); \
	done

mutants: env  ## The tests against silent bugs; generated ones: MUTANTS="--generated 400 --seed 1"
	$(RUN_MUTANTS) $(MUTANTS)

chaos: env  ## Kills, full disks, damages and mistakes in numbers; takes long; CHAOS="--only damages"
	.venv/bin/python tools/chaos.py $(CHAOS)

gpu: env  ## Every part checked and measured on a GPU, stage by stage
	.venv/bin/python benchmarks/gpu.py

fast: env  ## The tests that wait for no processes: three minutes
	.venv/bin/pytest $(PARALLEL) -m "not slow and not processes" tests/contracts tests/unit

quick: env  ## Formulas, advantages, collection, configuration: half a minute
	.venv/bin/pytest $(PARALLEL) --durations=5 $(QUICK)

size: env  ## Lines of the package by folder, and the code lines that `ppo` and `sft` reach
	@.venv/bin/python tools/size.py

lint: env  ## Style, prose, spelling, types and import layers
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python tools/check_prose.py openrlhf tools benchmarks examples recipes tests
	.venv/bin/python tools/check_waits.py openrlhf
	.venv/bin/codespell openrlhf tools benchmarks examples recipes tests docs dockerfile *.md Makefile
	.venv/bin/pyrefly check
	.venv/bin/lint-imports

docs: .venv-docs/installed  ## The documentation as a site, in build/site; a broken link is an error
	.venv-docs/bin/python tools/docs_site.py

docs-serve: .venv-docs/installed  ## The site at 127.0.0.1:8000, rebuilt after every edit
	.venv-docs/bin/python tools/docs_site.py serve

# Of its own, without torch: MkDocs reads sources and imports nothing of the package.
.venv-docs/installed: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	$(PYTHON) tools/docs_site.py requirements | .venv-docs/bin/pip install --quiet -r /dev/stdin
	touch $@

env:
	@$(PYTHON) tools/environment.py
