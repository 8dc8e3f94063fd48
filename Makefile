# Every target sets up what it needs: .venv is made on first use and renewed when the requirements change.
PYTHON ?= $(shell for v in 3.13 3.12 3.11; do python$$v -c '' 2>/dev/null && { echo python$$v; exit; }; done; echo python3)
BIN := .venv/bin
CONFIG ?= configs/shakespeare.gin
# A test mostly waits for the compiler, which has one thread.
PROCESSES := --numprocesses auto --maxprocesses 4
OUTPUT ?= runs/$(basename $(notdir $(CONFIG)))

.DEFAULT_GOAL := help
.PHONY: help train test test-all test-accelerator check fmt lint types bench trax clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(None if sys.version_info >= (3, 11) else f"reversible_trainer needs Python 3.11 or later; $(PYTHON) is {v}. Name another one: make PYTHON=/path/to/python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,interop]'
	@touch $@

train: .venv/ready  ## the main job: a reversible language model, layer by layer, with fused Shampoo
	$(BIN)/python -m reversible_trainer train --config $(CONFIG) --output $(OUTPUT)

test: .venv/ready  ## the tests, in under ten minutes
	$(BIN)/python -m pytest $(PROCESSES)

test-all: .venv/ready  ## the slow tests too
	$(BIN)/python -m pytest $(PROCESSES) -m 'not accelerator'

test-accelerator: .venv/ready  ## the tests that need a GPU or TPU
	$(BIN)/python -m pytest -m accelerator

check: lint types test  ## lint, types and tests

fmt: .venv/ready  ## format the code
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

lint: .venv/ready  ## ruff: format and lint
	$(BIN)/ruff format --check . && $(BIN)/ruff check .

types: .venv/ready  ## type-check the package
	$(BIN)/basedpyright

bench: .venv/ready  ## the benchmarks in scripts/
	@for script in scripts/bench_*.py; do echo $$script; $(BIN)/python $$script || exit 1; done

# Its TensorFlow is 3.2 GB, and is not needed: reversible_trainer/interop/trax_stubs.py. The other packages are ours too.
.venv/trax: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps trax
	@touch $@

trax: .venv/trax  ## install trax, for interop/trax.py and as a rival in scripts/bench_step.py

clean:  ## remove what was built; runs/ stays
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache
