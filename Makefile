# Every target prepares .venv first, once; after that nothing here needs a network.
#
#   make TORCH_INDEX=https://download.pytorch.org/whl/cpu test     a small CPU build of torch instead of the default one
#   make PYTHON=python3.12 test                                    another interpreter for .venv (3.10 or newer)

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
STEPS ?= 90
ROOT ?= holdfast-data
BENCH ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo serve test crash e2e bench check format clean

help: ## what can be made
	@sed -n 's/^\([a-z0-9]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(READY) ## kill a training run, resume it, prove that nothing was lost (under three minutes)
	$(BIN)/python -m holdfast.demo --steps $(STEPS)

serve: $(READY) ## run the daemon on ./holdfast-data
	$(BIN)/python -m holdfast_service --root $(ROOT)

test: $(READY) ## all tests but the long ones
	$(BIN)/python -m pytest

crash: $(READY) ## kill and fault injection, the long lanes included
	$(BIN)/python -m pytest -m "not e2e" --crash-report build/crash.json tests/crash

e2e: $(READY) ## the demo and other long runs, as tests
	$(BIN)/python -m pytest -m e2e

bench: $(READY) ## Holdfast and its peers, side by side; BENCH="--quick" to try it (docs/benchmarks.md)
	$(BIN)/python -m tests.benchmarks $(BENCH)

check: $(READY) ## format, lint, types, and who may import whom
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## rewrite what `check` would complain about, where a tool can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove caches, builds and the demo's output; .venv and holdfast-data stay
	rm -rf build dist demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find client formats service tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone, so that only this line decides which build of it is taken.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(BIN)/python -m pip install -e '.[dev]'
	touch $@
