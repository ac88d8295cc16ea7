# The Python that creates .venv; any from 3.10 on, for example `make demo PYTHON=python3.12`.
PYTHON ?= python3
VENV_PYTHON := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help python install demo test test-all lint format clean

help:  ## Print this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

python:
	@command -v "$(PYTHON)" >/dev/null || { echo "make: there is no $(PYTHON) here: install" \
	  "Python 3.10 or newer, or name the one to use, as in: make demo PYTHON=python3.12" >&2; exit 1; }

install: python  ## Create .venv and install everything into it (minutes; a second call does nothing).
	@"$(PYTHON)" tools/install.py

demo: install  ## Install, then run the demonstration.
	@$(VENV_PYTHON) tools/demo.py

test: install  ## Install, then run the tests.
	$(VENV_PYTHON) -m pytest

test-all: install  ## Run the slow tests too, and those for a CUDA device.
	$(VENV_PYTHON) -m pytest -m ""

lint: install  ## Check style and formatting.
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .

format: install  ## Mend style and formatting where that can be done automatically.
	$(VENV_PYTHON) -m ruff check --fix .
	$(VENV_PYTHON) -m ruff format .

clean:  ## Remove caches and build output (keeps .venv, data and work_dirs).
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./.venv/*" -prune -exec rm -rf {} +
