# Every target sets up .venv by itself. `make demo` and `make test` need nothing but Python 3.11+ and make.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
TORCHFT ?= torchft==0.2.0; sys_platform == 'linux' and platform_machine == 'x86_64'
PY     := .venv/bin/python
READY  := .venv/.ready
export PYTHONDONTWRITEBYTECODE =  # tests start a thousand processes: none should compile what another one has

.PHONY: help setup demo test check bench campaign docs clean

help:  ## what can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(READY)  ## create .venv with everything in it

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "torchLoom needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 setup"; exit 1; }
	@[ -x $(PY) ] || $(PYTHON) -m venv .venv
	@echo "installing torchLoom and its tools into .venv (the first time takes a minute)"
	@$(PY) -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@$(PY) -m pip install --quiet --disable-pip-version-check -e '.[dev]' "$(TORCHFT)"
	@touch $(READY)

demo: $(READY)  ## the main job end to end, narrated
	@$(PY) -m examples.demo

test: $(READY)  ## the tests, but for the longest; about ten minutes on two cores
	@$(PY) -m pytest -n 3 --dist loadfile --no-loadscope-reorder

check: $(READY)  ## ruff, mypy --strict, import-linter
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check . 
	@$(PY) -m mypy
	@.venv/bin/lint-imports

bench: $(READY)  ## every benchmark, against its peer in the same run
	@$(PY) -m benchmarks

campaign: $(READY)  ## long seeded fault runs (SEED=n repeats one), and tests that take long
	@$(PY) -m campaigns $(if $(SEED),--seed $(SEED))
	@$(PY) -m pytest -n 2 --dist loadfile -m long

docs: $(READY)  ## print the generated pages of docs/ anew
	@$(PY) -m docs.generate

clean:  ## remove .venv and caches
	@rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
