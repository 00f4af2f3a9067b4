# Everything needs Python 3.11 or later and pip, nothing else; what is installed goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo test check bench clean

setup: $(READY)

# torch first and by exact version, so that plain pip finds a CPU build where one is at hand.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch setuptools
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $(READY)

demo: setup
	$(BIN)/thinwire demo

test: lint docs
	$(BIN)/pytest -n 3 --dist worksteal

check: lint docs
	$(BIN)/pytest -n 3 --dist worksteal -m "not slow"

.PHONY: lint
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: docs
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: setup
	$(BIN)/thinwire bench step

# What documents and the library say of recorded trainings; after new lines in docs/results.
.PHONY: tables
tables: setup
	$(BIN)/thinwire results docs/results/*.jsonl --tables docs/results/tables --short docs/results/short.toml
	$(BIN)/python -m thinwire_lab.runs.evidence

clean:
	rm -rf .venv build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
