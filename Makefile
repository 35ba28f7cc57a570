# Every target sets .venv up on first use; a second run starts at once.
#
# MPI is the mpich package of PyPI. To use a site's own, name its compiler when .venv is made,
#     make train MPICC=/opt/mpi/bin/mpicc
# mpi4py is then compiled against that MPI, no other is installed, and .venv remembers both the
# compiler and the launcher: the mpiexec beside it unless MPIEXEC names another (MPIEXEC=srun).
# To change MPI, remove .venv.

PYTHON ?= python3
NP ?= 4
ARGS ?=
TORCH ?= 2.13.0

-include .venv/mpi.mk
ifdef MPICC
override MPICC := $(or $(shell command -v $(MPICC)),$(error MPICC=$(MPICC) is not an executable))
MPIEXEC ?= $(dir $(MPICC))mpiexec
MPI4PY := --no-cache-dir --no-binary=mpi4py mpi4py
export MPICC MPIEXEC
else
MPIEXEC ?= .venv/bin/mpiexec
MPI4PY := mpich mpi4py
endif

RUN := .venv/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check
SOURCES := $(wildcard setup.py collectives/*.pyx collectives/*.pxd collectives/*.h \
	collectives/protocols/*.py collectives/protocols/*.pxd)

.PHONY: help train test bench lint clean
.DELETE_ON_ERROR:

help:
	@echo "make train   train on NP=$(NP) ranks; ARGS go to 'wagma train'"
	@echo "make test    run all tests; ARGS go to pytest"
	@echo "make bench   measure; ARGS go to the benchmarks"
	@echo "make lint    check the style"
	@echo "make clean   remove what was built, except .venv"

train: .venv/built
	$(MPIEXEC) -n $(NP) .venv/bin/wagma train $(ARGS)

test: .venv/built
	@$(RUN) tests/run.py $(ARGS)

bench: .venv/built
	@$(RUN) -m benchmarks $(ARGS)

lint: .venv/installed
	@$(RUN) -m ruff check
	@$(RUN) -m ruff format --check

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .venv/built
	find collectives wagma tests benchmarks \( -name '*.so' -o -name __pycache__ \) \
		-prune -exec rm -rf {} + 2>/dev/null || true

.venv/built: .venv/installed $(SOURCES)
	@$(RUN) setup.py --quiet build_ext --inplace --parallel 2
	@touch $@

# --no-build-isolation: the extension must see the MPI and the mpi4py that it will run with.
.venv/installed: .venv/tools pyproject.toml
	@echo "Building wagma"
	@$(PIP) --no-build-isolation --editable '.[test,plot]'
	@touch $@

# PyPI's torch for Linux brings CUDA's libraries. The much smaller CPU build is found only where
# pip knows an index that has it (PIP_EXTRA_INDEX_URL: see PyTorch's install page).
.venv/tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo >&2 "wagma needs Python 3.10 or newer; name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo >&2 "$(PYTHON) has no venv; on Debian: apt-get install python3-venv"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; \
		sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
		{ echo >&2 "$(PYTHON) has no Python.h; on Debian: apt-get install python3-dev"; exit 1; }
	@echo "Setting up .venv with MPI, mpi4py and torch: some minutes the first time"
	@$(PYTHON) -m venv .venv
	@$(PIP) 'setuptools>=77' 'Cython>=3.1'
	@$(PIP) $(MPI4PY)
	@if command -v nvidia-smi >/dev/null || ! $(PIP) 'torch==$(TORCH)+cpu' 2>/dev/null; then \
		$(PIP) 'torch==$(TORCH)'; \
	fi
	@$(if $(MPICC),printf 'MPICC ?= %s\nMPIEXEC ?= %s\n' '$(MPICC)' '$(MPIEXEC)' > .venv/mpi.mk)
	@touch $@
