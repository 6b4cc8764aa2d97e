# Every target sets up .venv first. `make demo` and `make test` need nothing but Python 3.11+ and make.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
TORCH_INDEX ?=
TORCHFT ?= torchft==0.2.0; sys_platform == 'linux' and platform_machine == 'x86_64'
NOISE  ?=
WORKERS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2) + 1)))
PY     := .venv/bin/python
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
READY  := .venv/.ready
FRAMEWORKS := .venv/.frameworks
export PYTHONDONTWRITEBYTECODE =  # tests start a thousand processes: none should compile what another one has

.PHONY: help setup demo test test-all test-noise check bench campaign docs clean

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(READY)  ## create .venv with everything in it

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "torchLoom needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 setup"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) has no venv module. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@[ -x $(PY) ] || $(PYTHON) -m venv .venv
	@echo "installing torchLoom and its tools into .venv (the first time takes a minute)"
	@$(PY) -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)"
	@$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]' "$(TORCHFT)"
	@touch $(READY)

$(FRAMEWORKS): $(READY)
	@echo "installing the training frameworks that tests and benchmarks use into .venv"
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-compile "$(TORCH)" -e '.[frameworks]'
	@touch $(FRAMEWORKS)

demo: $(READY)  ## the main job end to end, narrated
	@$(PY) -m examples.demo

test: $(READY)  ## unit tests, and one on real processes for each promise; about three minutes on two cores
	@$(PYTEST)

test-all: $(FRAMEWORKS)  ## every test; about twenty minutes on two cores
	@$(PYTEST) -m ""

test-noise: $(READY)  ## core, agent and flow tests while every sentence is noise: no decision depends on wording
	@$(PYTEST) --noise $(or $(NOISE),-m "" tests/core tests/agent tests/flow)

check: $(READY)  ## ruff, mypy --strict, import-linter
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check . 
	@$(PY) -m mypy
	@.venv/bin/lint-imports

bench: $(FRAMEWORKS)  ## every benchmark, against its peer in the same run
	@$(PY) -m benchmarks

campaign: $(READY)  ## long seeded fault runs; SEED=n repeats one, SHORT=1 takes minutes
	@$(PY) -m campaigns $(if $(SEED),--seed $(SEED)) $(if $(SHORT),--short)

docs: $(READY)  ## write the generated pages of docs/
	@$(PY) -m docs.generate

clean:  ## remove .venv and caches
	@rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
