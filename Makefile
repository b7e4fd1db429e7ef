# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# one worker per core: tests run torch on one thread
PYTEST := $(BIN)/pytest -n auto
# jaxtyping shapes are checked by beartype; torch.compile cannot trace that, so compiled tests run without it
SHAPES := --jaxtyping-packages=clearhead,beartype.beartype

.PHONY: demo test check test-long lint bench clean

demo: $(VENV)/.installed        ## learn a vocabulary, train a small decoder for some minutes, let it speak
	$(BIN)/clearhead demo $(if $(wildcard runs/demo/recipe.toml),--resume)  # one that was stopped goes on

test: $(VENV)/.installed-test lint   ## everything but the long tests
	$(PYTEST) -m "compiled and not long"
	$(PYTEST) -m "not compiled and not long" $(SHAPES)

check: $(VENV)/.installed-test lint  ## lint, types and the quick tests: under two minutes
	$(PYTEST) -m "not slow and not long and not compiled" $(SHAPES)

test-long: $(VENV)/.installed-test   ## what takes longer than a coffee
	$(PYTEST) -m "compiled and long" --timeout 3600
	$(PYTEST) -m "not compiled and long" --timeout 3600 $(SHAPES)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --disable-pip-version-check -q -c constraints.txt -e ".[test]"
	@touch $@

bench: $(VENV)/.installed-test       ## side by side with peers; appends to benchmarks/RESULTS.md
	$(BIN)/python benchmarks/tokenizer.py --record
	$(BIN)/python benchmarks/prepare.py --record
	$(BIN)/python benchmarks/training.py --record
	$(BIN)/python benchmarks/throughput.py --record
	$(BIN)/python benchmarks/experts.py --record
	$(BIN)/python benchmarks/loading.py --record
	$(BIN)/python benchmarks/look.py --record

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
