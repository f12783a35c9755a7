# make help lists the targets. Every target prepares .venv by itself, once.
#
#   PYTHON=python3.12   interpreter that makes .venv (3.11 or newer)
#   TORCH=system        .venv sees the interpreter's own packages and uses the torch found there

PYTHON ?= python3
TORCH ?= pinned
TORCH_VERSION := 2.13.0

# Two test processes, each with its own pair of ranks; a file's tests stay together.
PARALLEL := -n 2 --dist loadfile
export OMP_NUM_THREADS ?= 1

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
MADE := $(VENV)/.made-$(TORCH)
# One stamp for each set of extras. Installing `dev` also installs what the demo needs.
DEMO_READY := $(VENV)/.ready-demo-$(TORCH)
DEV_READY := $(VENV)/.ready-dev-$(TORCH)

CHECK_PYTHON := import sys; sys.version_info >= (3, 11) or \
  sys.exit("make: dbo_fx needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0])

ifeq ($(TORCH),system)
VENV_FLAGS := --system-site-packages
SEES_SYSTEM := true
# Without this check pip would quietly download a torch.
CHECK_TORCH := import importlib.util, sys; importlib.util.find_spec("torch") or \
  sys.exit("make: TORCH=system, but $(PYTHON) has no torch outside virtual environments"); \
  import torch; tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11) or \
  sys.exit("make: dbo_fx needs torch 2.11 or newer, $(PYTHON) has " + torch.__version__)
else ifeq ($(TORCH),pinned)
SEES_SYSTEM := false
CHECK_TORCH := pass
else
$(error TORCH=$(TORCH): wanted `system`, or nothing for torch $(TORCH_VERSION))
endif

.PHONY: help demo test test-all lint types

help:
	@echo 'make demo      a small DeepSeek-V3 on two local ranks, compiled, run, checked (`dbo-fx demo`)'
	@echo 'make test      ruff, mypy and the default tests (under 10 minutes on 2 cores)'
	@echo 'make test-all  the slow tests, then benchmarks/limits.py (under 40 minutes)'
	@echo 'make lint      ruff and mypy only'
	@echo
	@echo 'PYTHON=python3.12  interpreter that makes .venv (3.11 or newer)'
	@echo 'TORCH=system       use the torch that PYTHON already has instead of torch $(TORCH_VERSION)'

demo: $(DEMO_READY)
	$(VENV)/bin/dbo-fx demo

test: lint
	$(PY) -m pytest $(PARALLEL)

test-all: $(DEV_READY)
	$(PY) -m pytest $(PARALLEL) -m slow
	@if [ -f benchmarks/limits.py ]; then \
	  echo '$(PY) benchmarks/limits.py'; $(PY) benchmarks/limits.py; \
	fi

lint: $(DEV_READY) types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# mypy knows nothing of the package-dir mapping in pyproject.toml. Its mypy_path holds one link
# that puts passes/ where its import name says: dbo_fx.passes.
types:
	@mkdir -p build/types/dbo_fx
	@ln -sfn ../../../passes build/types/dbo_fx/passes

$(MADE):
	@if [ ! -d $(VENV) ]; then \
	  $(PYTHON) -c '$(CHECK_PYTHON)' && \
	  $(PYTHON) -m venv $(VENV_FLAGS) $(VENV) && \
	  $(PY) -c '$(CHECK_TORCH)' || { rm -rf $(VENV); exit 1; }; \
	elif ! grep -q '^include-system-site-packages = $(SEES_SYSTEM)' $(VENV)/pyvenv.cfg; then \
	  echo 'make: $(VENV) was made with another TORCH= than $(TORCH). Pass the one it was' >&2; \
	  echo 'make: made with, or remove $(VENV) and call make again.' >&2; \
	  exit 1; \
	fi
ifneq ($(TORCH),system)
	$(PIP) torch==$(TORCH_VERSION)
endif
	@touch $@

$(DEMO_READY): $(MADE) pyproject.toml
	$(PIP) --editable '.[demo]'
	@touch $@

$(DEV_READY): $(MADE) pyproject.toml
	$(PIP) --editable '.[dev]'
	@touch $@ $(DEMO_READY)
