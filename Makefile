# Everything runs in .venv, which is made on first use. ARGS goes to bench.py or to pytest:
#   make bench ARGS="--model preset:smollm2-135m --batch-size 1 8"
#   make test ARGS="-k scheduler"

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := runtime graphs cache profiling
TYPES := build/types

.PHONY: bench test check format clean

bench: $(VENV)/.installed
	$(BIN)/python bench.py $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" $(ARGS)

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# The packages stand at the root and are installed under one name: show mypy that name.
	@mkdir -p $(TYPES)/stepgraph
	@for package in $(PACKAGES); do ln -sfn $(CURDIR)/$$package $(TYPES)/stepgraph/$$package; done
	MYPYPATH=$(TYPES) $(BIN)/mypy $(foreach package,$(PACKAGES),-p stepgraph.$(package))
	MYPYPATH=$(TYPES) $(BIN)/mypy bench.py

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[test,dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
