# Every verb does its own set-up: a virtual environment in $(VENV) with the package (editable) and its tools.
# make PYTHON=python3.12 VENV=/some/where test   chooses another interpreter or place.

PYTHON ?= python3
VENV ?= .venv
PYTEST_FLAGS ?=

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test lint lock bench integration integration-engines clean

help:  ## list the verbs
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 28

demo: $(READY)  ## mock workers, service and Envoy; shows one streaming and one plain request, then serves until Ctrl-C
	@$(BIN)/pd-extproc demo $(DEMO_FLAGS)

test: $(READY)  ## unit tests, and integration tests against a real Envoy
	$(BIN)/pytest -m "not engines" $(PYTEST_FLAGS) tests integration

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

lock:  ## write image/*.lock anew, as pyproject.toml asks: what the container image installs
	scripts/lock-requirements.sh

integration: $(READY)  ## only the tests against a real Envoy
	$(BIN)/pytest -m "not engines" $(PYTEST_FLAGS) integration

integration-engines: $(READY)  ## real SGLang and vLLM on the CPU: installs them first (6 GB), then compares answers through Envoy
	integration/engines/run

bench: $(READY)  ## CPU per request of Envoy and the sidecar, beside a plain proxy and the peer gateway
	$(BIN)/python -m bench $(BENCH_FLAGS)

clean:  ## remove what the verbs above made, except installed engines
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist pd_extproc.egg-info bench/results
	find extproc tests integration bench -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is missing or older than 3.11; name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@[ ! -e $(VENV) ] || [ -e $(VENV)/pyvenv.cfg ] || { echo "$(VENV) is there and is no virtual environment" >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
