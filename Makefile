# make serve   installs into .venv and serves the demo checkpoint; ARGS="..." are arguments of the server
# make test    lint, types, import contracts and tests; what .ci/run runs
# make lint    the first three of those
# make bench   the ratios of the README, measured on this machine (minutes; the index of the SSD store needs 7 GB of disk for a while)
# make clean   removes what the others made

PYTHON ?= python3
# On a machine where this name brings a CUDA build you do not want: make serve TORCH="torch==2.13.0 --index-url <index of CPU builds>"
TORCH ?= torch==2.13.0
# Arguments for the server: make serve ARGS="--port 8001 --redis-url none"
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: serve test lint bench venv clean
.DEFAULT_GOAL := serve

serve: $(VENV)/.installed
	@$(BIN)/forebay serve --model demo $(ARGS)

venv: $(VENV)/.installed

test: lint
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: $(VENV)/.installed
	$(BIN)/forebay bench prefill
	$(BIN)/forebay bench decode
	$(BIN)/forebay bench invariance
	$(BIN)/forebay bench serve --compare-sequential
	$(BIN)/forebay bench cache
	$(BIN)/forebay bench resume

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Forebay needs Python 3.11 or newer, %s is %s: set PYTHON=..." % (sys.executable, sys.version.split()[0]))'
	@echo "Installing Forebay and torch into $(VENV) (minutes; 1 GB, or 5 GB where torch comes with CUDA)"
	@$(PYTHON) -m venv $(VENV)
	@echo "1/2 torch"
	@$(PIP) install $(TORCH)
	@echo "2/2 Forebay"
	@$(PIP) install -q -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "Installing the test tools into $(VENV)"
	@$(PIP) install -q -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build dist src/forebay.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
