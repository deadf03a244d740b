# Each target makes its own environment in .venv if there is none.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OUT ?= reproduction

.PHONY: reproduce test test-slow lint bench bench-network bench-sampling bench-workers slurm clean

reproduce: $(READY)
	$(BIN)/copyhead reproduce --out $(OUT) $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(READY)
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/pyright

bench: $(READY)
	$(BIN)/python bench/step.py $(ARGS)

bench-sampling: $(READY)
	$(BIN)/python bench/sampling.py $(ARGS)

bench-workers: $(READY)
	$(BIN)/python bench/workers.py $(ARGS)

slurm:
	tests/slurm.sh

bench-network: $(READY)
	$(BIN)/python -m pip install --quiet --editable ".[bench]"
	$(BIN)/python bench/network.py $(ARGS)

$(READY): pyproject.toml
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'copyhead needs Python 3.11 or newer, not ' + sys.version.split()[0])"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV)
