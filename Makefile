# Everything happens in .venv; `make help` lists the targets.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := models,pipelines,data,store,dev

.DEFAULT_GOAL := help
.PHONY: help install run test lint format compile clean

help: ## Say what each target does
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## Make .venv with everything that run and test need (versions of constraints.txt)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make install PYTHON=/path/to/python3.11" >&2; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
		{ echo "no virtual environment could be made: on Debian, apt-get install python3-venv" >&2; exit 2; }
	$(BIN)/pip install --quiet --constraint constraints.txt torch setuptools
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[$(EXTRAS)]'
	@touch $@

run: install ## Run the whole pipeline here on its own S3 server; options: make run ARGS='--recipe NAME --set KEY=VALUE'
	$(BIN)/mar-grpo run $(ARGS)

test: install ## Run all tests, the short pipeline through S3 included; options: make test ARGS='-k NAME'
	$(BIN)/python -m pytest -q --numprocesses auto --maxprocesses 4 --dist loadfile $(ARGS)

lint: install ## Check style (ruff), types (mypy) and that the compiled YAML is up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install ## Put the code into the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

compile: install ## Compile every component and pipeline to YAML and write their READMEs
	$(BIN)/python -m mar_grpo.pipelines.compile

clean: ## Remove the environment and all caches (not .mar-grpo, where runs lie)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build dist
