VENV ?= .venv
PYTHON := $(VENV)/bin/python
GPU_PYTHON ?= python3
MINUTES ?= 10
# Release of vLLM that test-matrix runs beside the newest.
OLDER_VLLM ?= 0.23.0
OLDER ?= .venv-$(OLDER_VLLM)
OLDER_PYTHON := $(OLDER)/bin/python
# Release of vLLM-Ascend: 0.23.0, or the pre-release 0.26.0rc1.
ASCEND ?= 0.23.0
ASCEND_VENV ?= .venv-ascend-$(ASCEND)
TRITON_VENV ?= .venv-triton
TOOLS_VENV ?= .venv-tools
SET ?= all
# On two cores: tests wait a part of their time. Engines of more than three would wait for cores.
WORKERS ?= 4
ENGINE_WORKERS ?= 3
TIMES ?= 10
HERE := not gpu and not triton and not matrix and not ascend and not deploy
# Each test is run by one of the three: beside all others of its kind, a file by one process; so, but
# beside engines, which wait for one another as much as they work; or with nothing beside it.
BESIDE := not e2e and not soak and not alone
ENGINES := (e2e or soak) and not alone
ALONE := alone
# Files that have such tests: others need not be imported to find none in them. The longest, of the
# deployment and the soak, begin first.
MARKED_ENGINES := $(sort $(shell grep -rlE 'mark\.(e2e|soak)\b' tests --include='test_*.py'))
LONG_TESTS := $(filter tests/deploy/%,$(MARKED_ENGINES)) $(filter tests/soak/%,$(MARKED_ENGINES))
ENGINE_TESTS := $(LONG_TESTS) $(filter-out $(LONG_TESTS),$(MARKED_ENGINES))
SMALL_TESTS := $(sort $(shell grep -rlE 'mark\.small\b' tests --include='test_*.py'))
ALONE_TESTS := $(sort $(shell grep -rlE 'mark\.alone\b' tests --include='test_*.py'))
# A process that ended is not replaced: the next would run the same test, and end as it did.
BY_FILE := --dist loadfile --no-loadscope-reorder --max-worker-restart=0
TOGETHER := -n $(WORKERS) $(BY_FILE)
ENGINES_TOGETHER := -n $(ENGINE_WORKERS) $(BY_FILE)
RANDOM := $(HERE) and $(BESIDE) and not mooncake and not s3
FAST := $(RANDOM) and not slow
# The pool itself, of that, in a minute: keys, pages, lookups, plans of loads and saves, their graphs.
FAST_TESTS := $(wildcard tests/test_*.py) tests/layout tests/scheduler tests/staging tests/transfer tests/worker
# What runs under the older vLLM: what starts engines or uses vLLM's classes, or a part of it.
OLDER_TESTS := tests/vllm_adapt tests/faults tests/e2e tests/peers
OLDER_all := $(HERE)
OLDER_small := $(HERE) and (small or not e2e) and not slow and not mooncake and not s3
export VENV OLDER OLDER_VLLM ASCEND ASCEND_VENV TRITON_VENV TOOLS_VENV
# Or each of many processes compiles the package and its tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup environments demo up test test-fast test-push test-deploy test-matrix test-ascend test-triton fuzz gpu-test gpu-test-engines soak mutations check dist \
	docs bench format clean

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## make setup      the environment in .venv (all other targets see to it themselves)
setup:
	@scripts/setup.sh

## make environments  those of test-triton, test-matrix and test-ascend, one after the other
environments: setup
	@scripts/setup-triton.sh
	@VENV=$(OLDER) VLLM_VERSION=$(OLDER_VLLM) scripts/setup.sh
	@scripts/setup-ascend.sh

## make demo       a conversation in two engines of different shape that share one pool, and what it
##                  saved; ARGS=--random for random weights
demo:
	@scripts/setup.sh engines
	@$(PYTHON) examples/demo.py $(ARGS)

## make test       the whole suite, real engines included, by WORKERS=4 processes
test: setup test-triton
	$(PYTHON) -m pytest $(TOGETHER) -m "$(HERE) and $(BESIDE)"
	$(PYTHON) -m pytest $(ENGINES_TOGETHER) --durations=20 -m "$(HERE) and $(ENGINES)" $(ENGINE_TESTS)
	$(PYTHON) -m pytest -m "$(HERE) and $(ALONE)" $(ALONE_TESTS)

## make test-push  what each push is tested with: all but slow tests side by side, and a few on engines,
##                  among them one that is killed behind the router in mid-stream
test-push: setup test-triton
	$(PYTHON) -m pytest $(TOGETHER) -m "$(HERE) and $(BESIDE) and not slow"
	$(PYTHON) -m pytest $(ENGINES_TOGETHER) --durations=10 -m "$(HERE) and $(ENGINES) and small" $(SMALL_TESTS)

## make test-deploy  two prefill and two decode engines behind the router, each killed, and its processes;
##                  two data-parallel ones behind a server; make up; the examples; wheel and sdist
test-deploy: setup
	@scripts/setup-tools.sh
	$(PYTHON) -m pytest -m "deploy or e2e" tests/deploy

## make up         such a deployment to try, until Ctrl-C; ARGS="--prefill 1 --decode 1" for a smaller one
up: setup
	$(PYTHON) examples/07_router.py $(ARGS)

## make test-triton  GPU kernels in Triton's interpreter, in an environment of their own
test-triton:
	@scripts/setup-triton.sh
	TRITON_INTERPRET=1 $(TRITON_VENV)/bin/python -m pytest -n 2 -m triton tests/gpu

## make test-matrix  engines under the oldest vLLM that is supported, and with the newest on one pool
##                  (what runs under the newest alone is make test); OLDER_VLLM=0.26.0 for a release
##                  between the two; SET=small leaves most out
test-matrix: setup
	@VENV=$(OLDER) VLLM_VERSION=$(OLDER_VLLM) scripts/setup.sh
	$(OLDER_PYTHON) -m pytest $(TOGETHER) -m "$(OLDER_$(SET)) and $(BESIDE)" $(OLDER_TESTS)
	$(OLDER_PYTHON) -m pytest $(ENGINES_TOGETHER) -m "$(OLDER_$(SET)) and $(ENGINES)" $(OLDER_TESTS)
	$(OLDER_PYTHON) -m pytest -m "$(OLDER_$(SET)) and $(ALONE)" $(OLDER_TESTS)
	KVPOOL_OLDER_PYTHON=$(abspath $(OLDER_PYTHON)) $(PYTHON) -m pytest -m matrix tests/e2e

## make test-ascend  engines of the published vLLM-Ascend on an emulated NPU, and CPU engines, on one store;
##                  ASCEND=0.26.0rc1 for the pre-release
test-ascend: setup
	@scripts/setup-ascend.sh
	$(ASCEND_VENV)/bin/python -m pytest -m ascend tests/emulated_npu
	KVPOOL_ASCEND_PYTHON=$(abspath $(ASCEND_VENV)/bin/python) $(PYTHON) -m pytest -m ascend tests/e2e

## make test-fast  the pool itself, without engines, servers and disks: under a minute
test-fast: setup
	$(PYTHON) -m pytest $(TOGETHER) -m "$(FAST)" $(FAST_TESTS)

## make fuzz       all that needs no engines and no servers, with examples that no run has had before
fuzz: setup
	for i in $$(seq $(TIMES)); do $(PYTHON) -m pytest -q $(TOGETHER) --hypothesis-profile=fuzz \
		-m "$(RANDOM)" || exit 1; done
	HTTP_FUZZ=1000000 HTTP_FUZZ_SEED=$$(date +%s) $(PYTHON) -m pytest -q tests/router/test_http_fuzz.py

## make gpu-test   page copies on a GPU; on a machine with one, torch and Triton, without vLLM
gpu-test:
	$(GPU_PYTHON) -m pytest -m gpu tests/gpu

## make gpu-test-engines  engines on a GPU share their KV; needs a CUDA build of vLLM, too
gpu-test-engines:
	$(GPU_PYTHON) -m pytest -m gpu tests/gpu_engines

## make soak       kill -9 of servers, writers and readers for MINUTES=10; what the others held over
##                  time is drawn in build/soak.svg
soak: setup
	@mkdir -p build
	$(PYTHON) -m tests.soak --minutes $(MINUTES) --lines build/soak.jsonl
	$(PYTHON) -m tests.soak.plot build/soak.jsonl build/soak.svg

## make check      lint, format, types, layers
check: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m mypy --config-file tests/mypy.ini tests
	$(PYTHON) -m pytest -q tests/test_layering.py

## make dist       the wheel and the sdist in dist/, tried in empty environments; lints the Helm chart; checks
##                  that the site loads nothing from other hosts
dist: setup
	@scripts/setup-tools.sh
	rm -rf dist
	$(PYTHON) -m hatchling build
	$(PYTHON) -m pytest -q -m deploy tests/deploy/test_distribution.py tests/deploy/test_chart.py \
		tests/deploy/test_built_site.py

## make docs       the documents as a site in build/site; a link that leads nowhere is an error
docs:
	@scripts/setup-tools.sh
	@scripts/build-docs.sh

## make mutations  deliberate errors in the package, one at a time: how many the tests notice
mutations: setup
	$(PYTHON) -m tests.mutations.run --json tests/mutations/score.json

## make bench      every benchmark, with its numbers, in about 75 minutes; QUICK=1: only that they run, in 8
bench: setup
	$(PYTHON) benchmarks/run_all.py $(if $(QUICK),--quick)

## make format     let ruff put files in order
format: setup
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

## make clean      what tools left behind; keeps the environment
clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +
