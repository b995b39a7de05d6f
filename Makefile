VENV ?= .venv
PYTHON := $(VENV)/bin/python
GPU_PYTHON ?= python3
MINUTES ?= 10
OLDER_VLLM := 0.27.1
OLDER ?= .venv-$(OLDER_VLLM)
FAST := not e2e and not mooncake and not s3 and not gpu and not slow
export VENV

.PHONY: help setup demo test test-fast test-older gpu-test soak check bench format clean

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## make setup      the environment in .venv (all other targets see to it themselves)
setup:
	@scripts/setup.sh

## make demo       two engines share one pool; prints what it saved
demo: setup
	@$(PYTHON) examples/demo.py

## make test       the whole suite, real engines included
test: setup
	$(PYTHON) -m pytest -m "not gpu"

## make test-older  real engines of the oldest release of vLLM that is supported
test-older:
	@VENV=$(OLDER) VLLM_VERSION=$(OLDER_VLLM) scripts/setup.sh
	$(OLDER)/bin/python -m pytest -m "e2e and not mooncake and not s3" tests/e2e

## make test-fast  what needs neither engines nor servers: under a minute
test-fast: setup
	$(PYTHON) -m pytest -m "$(FAST)"

## make gpu-test   page copies on a GPU; on a machine with one, with torch, and without vLLM
gpu-test:
	$(GPU_PYTHON) -m pytest -m gpu tests/gpu

## make soak       kill -9 of stores, writers and readers for MINUTES=10
soak: setup
	$(PYTHON) -m tests.soak --minutes $(MINUTES)

## make check      lint, format, types, layers
check: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest -q tests/test_layering.py

## make bench      every benchmark, with its numbers
bench: setup
	$(PYTHON) benchmarks/run_all.py

## make format     let ruff put files in order
format: setup
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

## make clean      what tools left behind; keeps the environment
clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +
