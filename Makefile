# Everything runs in .venv, which is made on first use. ARGS goes to the command:
#   make bench ARGS="--model preset:smollm2-135m --batch-size 1 8"
#   make test ARGS="-k scheduler"
#   make test ARGS="-m slow"   (the sweeps that `make test` leaves out)
# Tests and benchmarks of the C++ kernels for another processor, here one without AVX512:
#   stepgraph build-kernels --out build/avx2 --march x86-64-v3
#   STEPGRAPH_KERNEL_DIR=build/avx2 make test ARGS=tests/kernels
# test-oldest runs the tests in .venv-oldest, on the oldest torch that pyproject.toml allows.
# house prints the size and the shape of the source tree.
# golden compares tokens, memory plans and times with those of an earlier commit:
#   make golden ARGS="--base e818c78 --quick"

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST_VENV := .venv-oldest
OLDEST_TORCH := $(shell sed -n 's/^ *"torch>=\([0-9.]*\),.*/\1/p' pyproject.toml)
# A worker that crashes ends the run: one in its place would wait for tests that never come.
PYTEST := -m pytest -n 2 --dist loadfile --max-worker-restart 0
# Otherwise each worker rewrites the assertions of all tests anew, which takes seconds.
test test-oldest: export PYTHONDONTWRITEBYTECODE =
LINKS := build/editable

.PHONY: bench chat test test-oldest check format house golden clean

bench: $(VENV)/.installed
	$(BIN)/python bench.py $(ARGS)

chat: $(VENV)/.installed-chat
	@$(BIN)/stepgraph chat smollm2 --temperature 0.2 $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python $(PYTEST) $(ARGS)

test-oldest: $(OLDEST_VENV)/.installed-test
	$(OLDEST_VENV)/bin/python $(PYTEST) $(ARGS)

check: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# An editable install links the packages there under their installed name.
	@test -d $(LINKS) || $(BIN)/python -m pip install --quiet --no-deps --editable .
	MYPYPATH=$(LINKS) $(BIN)/mypy -p stepgraph
	MYPYPATH=$(LINKS) $(BIN)/mypy bench.py

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

house: $(VENV)/.installed-test
	$(BIN)/python -m tests.rigs.house

golden: $(VENV)/.installed-test
	$(BIN)/python -m tests.rigs.golden $(ARGS)

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-chat: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[chat,gguf]"
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[test,dev]"
	touch $@

$(OLDEST_VENV)/.installed-test: pyproject.toml
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet "torch==$(OLDEST_TORCH)" --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST_VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
