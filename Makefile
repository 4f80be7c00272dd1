# make run, make test: everything, on a fresh machine with Python 3.11 or newer.
# make VENV=path run: with an environment of your own, which is used as it is.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
COMPARED := learned sinusoidal rope

ifeq ($(VENV),.venv)
READY := .venv/ready
TESTABLE := .venv/testable
endif

.PHONY: run compare study bench test test-slow lint format

run: $(READY)
	$(BIN)/python train.py configs/rope.toml
	$(BIN)/python sample.py out/rope-1337

compare: $(READY)
	set -e; for position in $(COMPARED); do $(BIN)/python train.py configs/$$position.toml; done
	$(BIN)/python compare.py $(COMPARED:%=out/%-1337) --picture out/compare.png

study: $(READY)
	$(BIN)/python study.py studies/quick.toml

bench: $(TESTABLE)
	$(BIN)/python bench.py --pairs 3 --json_file bench.json

test: $(TESTABLE)
	$(BIN)/python -m pytest -q

test-slow: $(TESTABLE)
	$(BIN)/python -m pytest -q -m slow

lint: $(TESTABLE)
	$(BIN)/ruff check .

format: $(TESTABLE)
	$(BIN)/ruff check --fix .

.venv/ready: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=... run")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet -r requirements.txt
	touch $@

.venv/testable: .venv/ready requirements-dev.txt
	.venv/bin/python -m pip install --quiet -r requirements-dev.txt
	touch $@
