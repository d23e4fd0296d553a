# Everything sets itself up: `make test` on a machine with python3 (3.11 or newer, with venv) and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

.PHONY: demo report test quick test-browser test-wheel test-integrations test-cluster lint types docs tables format clean

$(VENV)/.installed: pyproject.toml constraints.txt tests/requirements-no-deps.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "bsam needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,docs,experiments,theory]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement tests/requirements-no-deps.txt
	touch $@

demo: $(VENV)/.installed  ## train eight methods on digits and write report/index.html
	$(BIN)/bsam demo

report: $(VENV)/.installed  ## write report/paper.html from the records in results/
	$(BIN)/bsam report

test: $(VENV)/.installed  ## run the tests, the code in README and docs, and the doctests
	$(PYTEST) -m "not browser and not integrations and not cluster"

quick: $(VENV)/.installed  ## run what takes about a minute on two cores: bSAM's promises, posteriors, files, the imports
	$(PYTEST) -m "not slow and not browser and not integrations and not cluster" tests/optim tests/posterior tests/test_architecture.py tests/test_files.py \
	  -k "not SAM- and not VOGN and not IVON and not Extragradient"

test-browser: $(VENV)/.installed  ## run the tests that look at pages in Chromium
	$(BIN)/python -m pytest -m browser tests

$(VENV)/.integrations: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[integrations]'
	touch $@

test-integrations: $(VENV)/.integrations  ## run the tests with the trainers' libraries, and the code of their pages
	$(BIN)/python -m pytest -m integrations tests/integrations tests/test_documentation.py

$(VENV)/.cluster: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[cluster,tune]'
	touch $@

test-cluster: $(VENV)/.cluster  ## run the tests that start several processes or nodes: sharded models, Ray, Optuna
	$(BIN)/python -m pytest -m cluster tests

test-wheel: $(VENV)/.installed  ## build the wheel, install it into a clean environment, and run README's code there
	$(BIN)/python -m tools.wheel

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed
	$(BIN)/mypy

docs: $(VENV)/.installed  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

tables: $(VENV)/.installed  ## write the tables of README and docs anew from results/
	$(BIN)/python -m tools.tables

clean:
	rm -rf $(VENV) site report .pytest_cache .mypy_cache .ruff_cache .hypothesis
