# Two commands: `make demo` and `make test`. Both create .venv first if need be. What is
# in experiments/ has tests of its own: `make test-experiments`.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal
export JAX_PLATFORMS ?= cpu

.PHONY: setup demo edge test test-experiments lint docs figures clean

setup: .venv/.installed

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --editable ".[test]"
	touch $@

demo: setup
	$(BIN)/python -m experiments.demo

# The boards need gcc-arm-none-eabi, libnewlib-arm-none-eabi and qemu-system-arm.
edge: setup
	$(BIN)/python -m experiments.microcontroller --board=all --steps=800

test: setup
	$(MAKE) --jobs=2 lint docs
	$(PYTEST) --ignore=tests/experiments

test-experiments: setup
	$(PYTEST) tests/experiments

figures: setup
	$(BIN)/python -m experiments.devices
	$(BIN)/python -m experiments.benchmarks.tables
	$(BIN)/python -m experiments.plan_figure
	$(BIN)/python -m experiments.paper.questions --plot
	$(BIN)/python -m experiments.sparse.adapt --plot
	$(BIN)/python -m experiments.sparse.adapt_search --plot
	$(BIN)/python -m experiments.sparse.finetune --plot
	$(BIN)/python -m experiments.sparse.search --plot
	$(BIN)/python -m experiments.benchmarks.plan_benchmark --plot
	$(BIN)/python -m experiments.benchmarks.step_benchmark --plot
	$(BIN)/python -m experiments.benchmarks.small_steps --plot

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean:
	rm -rf .venv build outputs *.egg-info
