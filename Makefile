# `make` alone lists the targets. Everything is installed into .venv; nothing outside this folder is touched.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help install lint test demo clean

PYTHON ?= python3
PYTEST_ARGS ?=
MODEL := tiny
STEPS := 300
RANKS := 2
DEMO_DATA := data/demo
DEMO_DIR := runs/demo

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input
export PIP_USER := 0
# The default, ~/.cache, is keyed by Python version: two environments would rebuild each other's kernels.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.venv/torch_extensions

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'Variables: PYTHON=$(PYTHON) PYTEST_ARGS="-k order"'
	@echo '           demo: MODEL=$(MODEL) STEPS=$(STEPS) RANKS=$(RANKS) DEMO_DATA=$(DEMO_DATA) DEMO_DIR=$(DEMO_DIR)'
	@echo 'GPU:       install the torch build that fits your driver first; make keeps a torch that is in .venv:'
	@echo '           $(PYTHON) -m venv .venv && .venv/bin/pip install torch…  (your build), then make install'

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo 'error: Python 3.10 or newer is needed and "$(PYTHON)" is not one; name another with make PYTHON=…' >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { \
	  echo 'error: "$(PYTHON)" has no venv; on Debian or Ubuntu: apt-get install python3-venv' >&2; \
	  exit 1; }
	$(PYTHON) -m venv .venv

# A torch of another version than ours, put into .venv by the user, stays: it decides its own requirements.
define PRINT_CONSTRAINTS
import importlib.metadata, pathlib, re

def normalized(requirement):
    return re.sub("[-_.]+", "-", re.match("[A-Za-z0-9._-]+", requirement).group()).lower()

pins = [line for line in pathlib.Path("constraints.txt").read_text().splitlines() if line[:1] not in ("", "#")]
torch = next(importlib.metadata.distributions(name="torch"), None)
if torch and f"torch=={torch.version.split('+')[0]}" not in pins:
    freed = {"torch", *map(normalized, torch.requires or [])}
    pins = [pin for pin in pins if normalized(pin) not in freed] + [f"torch=={torch.version}"]
print("\n".join(pins))
endef
export PRINT_CONSTRAINTS

# deepspeed is built from source. Without isolation its build sees the torch that it will run with, and the
# setuptools named in constraints.txt; torch and setuptools therefore come first.
.venv/.installed: setup.py constraints.txt .venv/bin/python
	@echo 'Installing into .venv (1.5 GB; two minutes)'
	@$(PY) -c 'import importlib.metadata; importlib.metadata.files("pip")[0]' 2> /dev/null \
	  || $(PY) -m ensurepip --upgrade  # no pip, or half of one because the making of .venv was killed
	@$(PY) -c "$$PRINT_CONSTRAINTS" > .venv/constraints.txt
	$(PIP) install --quiet -c .venv/constraints.txt 'setuptools>=77' torch
	$(PIP) install --quiet -c .venv/constraints.txt --no-build-isolation --use-pep517 -e '.[test]'
	@$(PY) -c 'import torch; print("Installed, with torch", torch.__version__)'
	@touch $@

install: .venv/.installed  ## make .venv and install into it (a second time: nothing to do)

lint: install  ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

test: lint  ## install, lint, then pytest; PYTEST_ARGS="-k order" chooses tests, "-m slow" the slow ones
	$(PY) -m pytest $(PYTEST_ARGS)

# Real text to try things on: 106 Wikipedia pages that the gensim package carries as test data. Only that file is
# taken from the package, so the platform named here need not be this machine's.
WIKI_IN_GENSIM := gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2
DEMO_TEXT := $(DEMO_DATA)/wikipedia.xml.bz2
$(DEMO_TEXT): | install
	@echo '== Text: a piece of English Wikipedia, out of the test data of the gensim 4.4.0 wheel'
	@rm -rf $(DEMO_DATA)/download && mkdir -p $(DEMO_DATA)/download
	$(PIP) download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
	  --platform manylinux_2_28_x86_64 -d $(DEMO_DATA)/download gensim==4.4.0
	@$(PY) -m zipfile -e $(DEMO_DATA)/download/gensim-*.whl $(DEMO_DATA)/download
	@mv $(DEMO_DATA)/download/$(WIKI_IN_GENSIM) $@
	@rm -rf $(DEMO_DATA)/download

demo: install $(DEMO_TEXT)  ## minutes on two cores: real text, tokenizer, shards, pretraining; goes on where it was killed
	@echo '== Tokenizer'
	$(PY) data_prep/run.py tokenizer --input $(DEMO_TEXT) --output $(DEMO_DATA)/tokenizer \
	  --vocab_size 8000 --eval_fraction 0.05
	@echo '== Shards'
	$(PY) data_prep/run.py shards --input $(DEMO_TEXT) --tokenizer $(DEMO_DATA)/tokenizer \
	  --output $(DEMO_DATA)/shards --seq_len 128 --eval_fraction 0.05 --workers 2
	$(PY) data_prep/run.py inspect $(DEMO_DATA)/shards
	@echo '== Pretraining: $(STEPS) steps on $(RANKS) ranks'
	PATH="$(CURDIR)/.venv/bin:$$PATH" deepspeed --num_accelerators $(RANKS) pretraining/run.py \
	  --deepspeed_config ds_configs/demo.json --model $(MODEL) --data $(DEMO_DATA)/shards \
	  --output $(DEMO_DIR) --max_steps $(STEPS)
	@echo '== Export to a Hugging Face folder, and what the model puts in the place of [MASK]'
	$(PY) pretraining/export.py $(DEMO_DIR) --output $(DEMO_DIR)/exported
	$(PY) pretraining/fill_mask.py $(DEMO_DIR)/exported "The capital of France is [MASK]."
	@echo '== Done. Shards: $(DEMO_DATA)/shards; checkpoints, metrics and exported model: $(DEMO_DIR). To see the curves:'
	@echo '   .venv/bin/tensorboard --logdir runs'

clean:  ## remove .venv and caches; data/ and runs/ stay
	rm -rf .venv .pytest_cache .ruff_cache *.egg-info
	find data_prep pretraining fine_tuning tests -name __pycache__ -prune -exec rm -rf {} +
