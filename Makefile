# make train   train SmolLM2-135M on single-digit addition with P3O (CPU, two ranks)
# make test    lint, type-check and run the whole test suite
# make study   the study of examples/fp8_study: what rollout mismatch does to which objective
# make sglang  SGLang's CPU server in an environment of its own, for examples/sglang_cpu and tests
#
# Everything is installed into a virtual environment of this directory; nothing else is touched.
# Variables: PYTHON=python3.12   TORCH=torch==2.13.0   ARGS="--run.seed 1 --run.dir runs/seed1"

SHELL := /bin/bash
.DEFAULT_GOAL := help

# Prints the version of the Python $1 when it runs and is new enough.
version_of = $(shell $1 -c 'import sys; v = sys.version_info; \
	print("%d.%d" % v[:2]) if v >= (3, 11) else sys.exit(1)' 2>/dev/null)

ifeq ($(PYTHON),)
PYTHON := $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(if $(call version_of,$p),$p)))
endif
ifeq ($(PYTHON),)
$(error no Python 3.11 or newer on PATH; install one, or give it: make PYTHON=/path/to/python3)
endif
VERSION := $(call version_of,$(PYTHON))
ifeq ($(VERSION),)
$(error $(PYTHON) does not run or is older than 3.11; give another: make PYTHON=/path/to/python3)
endif

# torch goes in first, so that no other package chooses one. megatron-core decides the version.
TORCH ?= $(if $(filter 3.11,$(VERSION)),torch==2.13.0,torch==2.11.0)
VENV := .venv-$(VERSION)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The servers' environment is independent of ours.
SGLANG_PYTHON ?= $(firstword $(foreach p,python3.11 $(PYTHON),$(if $(call version_of,$p),$p)))
SGLANG_VENV := .venv-sglang
SGLANG_READY := $(SGLANG_VENV)/.ready
MODEL := models/SmolLM2-135M-Instruct
TINY := models/tiny
STUDY := examples/fp8_study
STUDY_MODEL := models/running_sums
JOBS ?= 2
RUN := examples/quickstart/run.yaml
ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help venv model sglang train tiny study lint test clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile
	@echo "Others: make tiny (a minute), make lint, make venv, make model, make clean"

venv: $(READY)
	@echo "== $(VENV) is ready"

$(READY): pyproject.toml Makefile
	@echo "== virtual environment $(VENV) ($(PYTHON), $(TORCH))"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

sglang: $(SGLANG_READY)
	@echo "== $(SGLANG_VENV) is ready"

$(SGLANG_READY): tools/setup_sglang_cpu.sh $(wildcard tools/sglang_cpu/* tools/sglang_cpu/plugin/*)
	@echo "== virtual environment $(SGLANG_VENV) ($(SGLANG_PYTHON), sglang on the CPU)"
	rm -rf $(SGLANG_VENV)
	tools/setup_sglang_cpu.sh $(SGLANG_VENV) $(SGLANG_PYTHON)
	@touch $@

model: $(MODEL)/config.json

$(MODEL)/config.json: | $(READY)
	@echo "== model $(MODEL)"
	$(BIN)/python tools/prepare_smollm2.py $(MODEL)

$(TINY)/config.json: | $(READY)
	@echo "== model $(TINY)"
	$(BIN)/python tools/make_tiny_model.py $(TINY)

train: $(READY) $(MODEL)/config.json
	@$(call run,runs/quickstart,$(RUN),$(ARGS))

tiny: $(READY) $(TINY)/config.json
	@$(call run,runs/tiny,examples/tiny/run.yaml,$(ARGS))

# Taught by supervised training first; the run dir is left for its curves.
$(STUDY_MODEL)/config.json: $(TINY)/config.json $(STUDY)/sft.yaml
	@$(call run,runs/fp8_study_sft,$(STUDY)/sft.yaml)
	rm -rf $(STUDY_MODEL)
	$(BIN)/p3o reshard runs/fp8_study_sft $(STUDY_MODEL) --to hf --config $(TINY)

study: $(READY) $(STUDY_MODEL)/config.json
	$(BIN)/p3o study run $(STUDY)/study.yaml --jobs $(JOBS) $(ARGS)
	$(BIN)/p3o study report runs/fp8_study

# An existing run dir is continued: an unfinished run from its checkpoint, a finished one shown.
define run
resume=""; if [ -e $(1)/config.yaml ] && [[ "$(3)" != *--run.dir* ]]; then \
	resume="--resume"; echo "== $(1) exists: continuing it (remove it to start again)"; fi; \
set -x; $(BIN)/p3o train $(2) $$resume $(3)
endef

lint: $(READY)
	@echo "== lint"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint $(MODEL)/config.json $(SGLANG_READY)
	@echo "== tests"
	$(BIN)/python -m pytest tests

clean:
	@echo "== removing environments and caches; models/ and runs/ are kept"
	rm -rf .venv-* .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
