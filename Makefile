# The two commands a newcomer needs are `make demo` and `make test`; both set everything up first and can be repeated.

# The first Python of 3.11 or newer. Another one: make PYTHON=/path/to/python demo
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done)
BIN := .venv/bin
CODE := lychee_local benchmarks tests setup

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## .venv with everything in it, and a llama.cpp built for this CPU
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; install it, or say make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) setup/install.py

demo: setup  ## a sample conversation: remembered, recalled, asked about (fetches a 1.1 GB model the first time)
	@$(BIN)/lychee models pull --profile laptop
	@$(BIN)/lychee demo

test: setup  ## every check: style, types, tests on real small models (fetches 0.2 GB the first time)
	@$(BIN)/lychee models pull --profile tiny
	@$(MAKE) --no-print-directory lint
	@$(BIN)/pytest --require-models

lint: setup  ## style and types only
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/mypy

clean:  ## removes .venv and caches of this checkout; models and memories stay
	@rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
