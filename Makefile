# Two commands do all the set-up on a machine with only Python 3.11+, pip and make:
#   make demo   environment, embedded database, the main job; prints the recommendation
#   make test   every check and every test (CI=true or BRIDGE=1 adds the tests against the real Megatron-Bridge)
.PHONY: help demo setup test lint types imports dependencies unit bridge bridge-test openapi-check format lock audit bench serve clean
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BRIDGE_VENV := .venv-bridge
BRIDGE_BIN := $(BRIDGE_VENV)/bin
PIP_QUIET := --quiet --disable-pip-version-check

help:
	@sed -n 's/^#   //p' Makefile
	@echo "also: make setup | lint | types | imports | dependencies | unit | bridge | format | lock | audit | bench | serve | clean"

setup: $(VENV)/.ready

# The project itself is installed last, editable, with the build backend from the lock: nothing unlocked is fetched.
$(VENV)/.ready: requirements-dev.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_QUIET) --require-hashes -r requirements-dev.lock
	$(BIN)/pip install $(PIP_QUIET) --no-deps --no-build-isolation -e .
	touch $@

demo: setup
	@$(BIN)/oombudsman db upgrade
	@$(BIN)/oombudsman recommend --recipe llama3_8b_pretrain_config --gpu h100-80gb --num-gpus 2
	@echo
	@echo "Serve the same over HTTP:  $(BIN)/oombudsman serve     (then POST http://127.0.0.1:8000/recommend)"

test: setup lint types imports dependencies $(if $(CI)$(BRIDGE),bridge-test) unit

lint: setup
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

dependencies: setup
	$(BIN)/deptry .

unit: setup
	$(BIN)/pytest

# The real Megatron-Bridge, on the CPU. Its wheels ask for Python 3.12 and for GPU-only packages, hence --no-deps.
bridge: $(BRIDGE_VENV)/.ready

$(BRIDGE_VENV)/.ready: requirements-bridge.txt requirements-bridge-nodeps.txt pyproject.toml
	test -x $(BRIDGE_BIN)/python || $(PYTHON) -m venv $(BRIDGE_VENV)
	$(BRIDGE_BIN)/pip install $(PIP_QUIET) torch==2.13.0
	$(BRIDGE_BIN)/pip install $(PIP_QUIET) -r requirements-bridge.txt
	$(BRIDGE_BIN)/pip install $(PIP_QUIET) --no-deps --ignore-requires-python -r requirements-bridge-nodeps.txt
	$(BRIDGE_BIN)/pip install $(PIP_QUIET) --no-deps --no-build-isolation -e .
	touch $@

# Exit status 5 means that no test carries the marker.
bridge-test: bridge
	$(BRIDGE_BIN)/pytest -m bridge -p no:cacheprovider || test $$? -eq 5

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: setup
	$(BIN)/pip-compile --quiet --upgrade --extra dev $(LOCK_OPTIONS) --output-file requirements-dev.lock pyproject.toml
	$(BIN)/pip-compile --quiet $(LOCK_OPTIONS) --constraint requirements-dev.lock --output-file requirements.lock pyproject.toml

LOCK_OPTIONS := --strip-extras --allow-unsafe --generate-hashes --no-annotate --no-emit-index-url --no-emit-find-links --no-emit-trusted-host

audit: setup
	$(BIN)/pip-audit --require-hashes -r requirements.lock

bench: setup
	$(BIN)/python benchmarks/request_cost.py

serve: setup
	$(BIN)/oombudsman serve

clean:
	rm -rf $(VENV) $(BRIDGE_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
