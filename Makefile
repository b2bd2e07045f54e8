# Everything runs from .venv, which the first target that needs it builds.
PYTHON ?= python3.11
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: help demo test ab chaos lint clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/.installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --requirement requirements.txt
	touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	$(PY) -m pip install --quiet --requirement requirements-dev.txt
	touch $@

demo: $(VENV)/.installed  ## build a table, train, evaluate, sample: 5 minutes on 2 cores
	$(PY) scripts/ingest.py stdlib
	$(PY) scripts/curate.py
	$(PY) scripts/tokenize_corpus.py
	$(PY) train.py --model tiny --pack --steps 500 --lr 3e-3 --warmup-steps 50
	$(PY) scripts/sample.py --prompt "The "

test: $(VENV)/.installed-dev  ## run all tests
	$(PY) -m pytest

ab: $(VENV)/.installed-dev  ## compare all loaders on the demo corpus: 9 minutes on 2 cores
	test -d lance_pretrain_db || $(PY) scripts/demo.py
	$(PY) scripts/ab.py --blocks runs/demo_blocks

chaos: $(VENV)/.installed-dev  ## kill a run 20 times at random and compare with a whole one
	$(PY) tests/chaos.py --kills 20

lint: $(VENV)/.installed-dev  ## ruff check and format
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

clean:  ## remove .venv and caches; data, runs and checkpoints stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
