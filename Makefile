# make serve   installs into .venv and serves the demo checkpoint; ARGS="..." are arguments of the server
# make test    lint, types, import contracts and tests; what .ci/run runs
# make lint    the first three of those
# make bench   the ratios of the README, measured on this machine (minutes; the index of the SSD store needs 7 GB of disk for a while)
# make demo-data   the text that the demo network is trained on, from two Debian documentation packages (19 MB fetched, nothing installed)
# make demo-train  trains the demo network (one GPU; goes on where it was stopped) and writes it to build/demo-checkpoint;
#                  TRAIN="--seconds 500" trains for a piece
# make demo-tokenizer   trains a tokenizer like the demo's (into build/; the committed one stays)
# make demo-eval   what the demo network gets right, in the default mode and under approximations; QUALITY="--quick" for a look
# make clean   removes what the others made

PYTHON ?= python3
# On a machine where this name brings a CUDA build you do not want: make serve TORCH="torch==2.13.0 --index-url <index of CPU builds>"
TORCH ?= torch==2.13.0
# Arguments for the server: make serve ARGS="--port 8001 --redis-url none"
ARGS ?=

# Arguments of demo-train and demo-eval
TRAIN ?=
QUALITY ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: serve test lint bench venv clean demo-data demo-train demo-tokenizer demo-eval
.DEFAULT_GOAL := serve

serve: $(VENV)/.installed
	@$(BIN)/forebay serve --model demo $(ARGS)

venv: $(VENV)/.installed

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(ARGS)

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

demo-data: $(VENV)/.installed
	$(BIN)/python -m forebay.model.demo.train.corpus build/demo-data

demo-tokenizer: demo-data
	$(BIN)/python -m forebay.model.demo.train.tokenizer build/demo-data build/demo-tokenizer.json

demo-train: $(VENV)/.installed
	test -e build/demo-data/corpus.bin || $(MAKE) demo-data
	$(BIN)/python -m forebay.model.demo.train.run --data build/demo-data --out build/demo-train $(TRAIN)
	$(BIN)/python -m forebay.model.demo.train.export --run build/demo-train --out build/demo-checkpoint

demo-eval: $(VENV)/.installed-quality
	$(BIN)/forebay bench quality --model demo --json quality.json --plot quality.png $(QUALITY)

$(VENV)/.installed-quality: $(VENV)/.installed
	@echo "Installing matplotlib into $(VENV)"
	@$(PIP) install -q -e '.[quality]'
	@touch $@

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
	rm -rf $(VENV) build dist quality.json quality.png src/forebay.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
