# One virtual environment in .venv serves every target; it is made, and brought up to date, when needed.
# For another Python: make PYTHON=python3.12 …   For pip options (see constraints.txt on torch): make PIP_ARGS="…" …

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=

# The tests run their tiny models on one thread each, one worker per core.
PARALLEL := -n auto --dist worksteal

VENV := .venv
OLDEST := .venv-oldest
STAMP := $(VENV)/.installed
OLDEST_STAMP := $(OLDEST)/.installed

# The oldest transformers supported, and the hub client that goes with it.
OLDEST_TRANSFORMERS := transformers==5.17.0
OLDEST_HUB := huggingface-hub<2

.PHONY: help demo test test-oldest lint clean
.DEFAULT_GOAL := help

help:
	@echo "make demo         train, sweep-exit, regress and decode on a 135M model; one table at the end"
	@echo "make test         the test suite"
	@echo "make test-oldest  tests/model and tests/decode under the oldest supported transformers"
	@echo "make lint         ruff and mypy"
	@echo "make clean        remove environments, caches and build files (demo-output/ stays)"

demo: $(STAMP)
	$(VENV)/bin/python scripts/demo.py $(DEMO_ARGS)

test: $(STAMP)
	$(VENV)/bin/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

test-oldest: $(OLDEST_STAMP)
	$(OLDEST)/bin/python -m pytest tests/model tests/decode $(PARALLEL) $(PYTEST_ARGS)

lint: $(STAMP)
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy

# The stamp is written last, so an interrupted installation is taken up again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("selfspec needs Python 3.11 or newer; try make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[demo,dev]'
	touch $@

$(OLDEST_STAMP): pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(OLDEST)
	grep -v -i -E '^(transformers|huggingface[-_]hub)==' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install $(PIP_ARGS) -c $(OLDEST)/constraints.txt \
		-e '.[demo,dev]' '$(OLDEST_TRANSFORMERS)' '$(OLDEST_HUB)'
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find selfspec_tune kernels scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
