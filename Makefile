# `make demo` and `make test` set up everything they need on a fresh machine.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Containers set it; each of the hundreds of processes that tests start would then compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
# A file's tests share what its fixtures made, and so go to one worker.
WORKERS := -n 2 --dist loadfile

.PHONY: chaos demo device-check device-wheels families fast fuzz test lock test-bounds test-cuda-build test-frameworks test-full test-locked test-loops test-matrix test-megatron-next test-msrun test-slurm test-stores test-targets lint types unit docs browser pace pictures release-check simgrid study wheel clean mutations held

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[torch,hf,finetune,report,megatron,video]" --group dev --group docs
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/fcp demo

# Types beside the tests, which begin with compiling the planner on one core.
test: $(STAMP)
	$(MAKE) --no-print-directory --jobs=2 lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS) --no-loadscope-reorder --durations=20

# What `make test` installs, pinned and with hashes, in requirements-ci.txt: after a change of dependencies, on Python 3.11.
lock: $(STAMP)
	$(BIN)/python -m tests.lock

# `make test` in an environment of those very files. For Python 3.11 on Linux and x86_64, so nothing else depends on it.
LOCKED_VENV  ?= .venv-locked
LOCKED_STAMP := $(LOCKED_VENV)/.installed

$(LOCKED_STAMP): pyproject.toml constraints.txt requirements-ci.txt
	$(PYTHON) -m venv $(LOCKED_VENV)
	$(LOCKED_VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(LOCKED_VENV)/bin/python -m pip install --quiet --no-deps --require-hashes --only-binary :all: --requirement requirements-ci.txt
	$(LOCKED_VENV)/bin/python -m pip install --quiet --no-deps --constraint constraints.txt torch
	$(LOCKED_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(LOCKED_STAMP)

test-locked: $(LOCKED_STAMP)
	$(MAKE) --no-print-directory BIN=$(LOCKED_VENV)/bin STAMP=$(LOCKED_STAMP) lint types unit

# The inner loop, under a minute on two cores: the tests that neither start processes nor need PyTorch nor take long, of properties a
# fifth of the examples.
fast: $(STAMP)
	HYPOTHESIS_PROFILE=quick $(BIN)/python -m pytest $(WORKERS) --quiet -m "not processes and not torch and not lengthy"

# The site of docs/, into site/; `make test` builds it, too. Any warning is an error, and nothing is fetched from elsewhere.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Pages in a headless Chromium (`apt install chromium`); `make test` runs these tests too once this was run.
browser: $(STAMP)
	$(BIN)/python -m pip install --quiet --group browser
	$(BIN)/python -m pytest -m browser

# What is released, into dist/: a wheel with the planner compiled for this Python and architecture, and the sources.
wheel: $(STAMP)
	rm -rf build/compiled dist
	$(BIN)/python hatch_build.py
	$(BIN)/python -m pip install --quiet build twine hatchling
	$(BIN)/python -m build --no-isolation --sdist --wheel  # both of this folder: the sources alone have no build/
	$(BIN)/python -m twine check --strict dist/*

# The wheel and the sources as strangers install them: each in an empty environment, read-only and without a cache, first alone and
# then with extras; every command of a first session, a training and the demo. Some ten minutes, nearly all for downloads of PyTorch.
release-check: wheel
	$(BIN)/python -m tests.release_check dist/*.whl dist/*.tar.gz

# The pictures of README and docs, from plans made on the spot; some minutes, nearly all for plans of 16,384 ranks.
pictures: $(STAMP)
	$(BIN)/python -m benchmarks.picture docs/pictures
	$(BIN)/python -m benchmarks.planner growth --ranks 65536 --picture docs/pictures/planner-growth.svg

# Plans in wall time, on ranks that sleep an accelerator's seconds and really wait for each other; some ten minutes, mostly asleep.
pace: $(STAMP)
	$(BIN)/python -m benchmarks.pace --picture docs/pictures/paced.svg

# Plans replayed by SimGrid, in which messages share links, beside their predicted seconds; some minutes. Needs root, on Debian or
# Ubuntu, whose python3-simgrid it installs where it is not there: the package index has its sources alone.
simgrid: $(STAMP)
	/usr/bin/python3 -c "import simgrid" 2> /dev/null || { apt-get update -qq && apt-get install -y -qq python3-simgrid; }
	$(BIN)/python -m benchmarks.simgrid_replay --ranks 64
	$(BIN)/python -m benchmarks.simgrid_replay --ranks 1024 --blocks 2

# The papers' study by simulation, docs/research/study.md and its pictures; some minutes.
study: $(STAMP)
	$(BIN)/python -m benchmarks.study

# Real msrun jobs. MindSpore needs numpy 1 and is a download of 800 MB, so it has an environment of its own.
MSRUN_VENV  ?= .venv-msrun
MSRUN_STAMP := $(MSRUN_VENV)/.installed

$(MSRUN_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(MSRUN_VENV)
	$(MSRUN_VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(MSRUN_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[torch,hf,mindspore]" --group dev
	touch $(MSRUN_STAMP)

test-msrun: $(MSRUN_STAMP)
	$(MSRUN_VENV)/bin/python -m pytest -m mindspore tests/launching tests/runtime/test_mindspore.py

# Real jobs under a real Slurm: a controller and two nodes on this machine, in a temporary folder, ended with the tests. Needs
# root, on Debian or Ubuntu, whose packages of Slurm and munge it installs where they are not there.
test-slurm: $(STAMP)
	command -v slurmctld slurmd munged > /dev/null || { apt-get update -qq && apt-get install -y -qq slurm-wlm munge; }
	$(BIN)/python -m pytest -m slurm tests/launching --durations=20

# Files for clusters, read by the tools that they are for. Nothing is started.
TARGETS_VENV  ?= .venv-targets
TARGETS_STAMP := $(TARGETS_VENV)/.installed

$(TARGETS_STAMP): pyproject.toml
	$(PYTHON) -m venv $(TARGETS_VENV)
	$(TARGETS_VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(TARGETS_VENV)/bin/python -m pip install --quiet --editable . --group dev kubeflow-trainer-api skypilot ray
	touch $(TARGETS_STAMP)

test-targets: $(TARGETS_STAMP)
	$(TARGETS_VENV)/bin/python -m pytest tests/launching/test_real_tools.py

# Manifests from a real server of S3 with faults, and from Azure's emulator where npm is; both are started and ended by the tests.
STORES_VENV  ?= .venv-stores
STORES_STAMP := $(STORES_VENV)/.installed

$(STORES_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(STORES_VENV)
	$(STORES_VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(STORES_VENV)/bin/python -m pip install --quiet --editable ".[remote]" tokenizers --group dev --group stores
	! command -v npm > /dev/null || npm install --silent --no-fund --no-audit --prefix $(STORES_VENV) azurite@3.37.0
	touch $(STORES_STAMP)

test-stores: $(STORES_STAMP)
	$(STORES_VENV)/bin/python -m pytest -m stores tests/manifest --durations=20

# What the runtime calls of PyTorch's CUDA builds, without a GPU: schemas, fake tensors, Triton's kernels as machine code. Prints
# what docs/research/without-a-gpu.md shows. Each build is some 3 GB of downloads in an environment of its own.
CUDA_TORCHES     := 2.14.1 2.11.0
cuda_2.14.1_with := flash-attn-4==4.0.0b36

.venv-cuda-%/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(@D)/bin/python -m pip install --quiet torch==$* $(cuda_$*_with) --editable . --group dev
	touch $@

test-cuda-build: $(CUDA_TORCHES:%=.venv-cuda-%/.installed)
	set -e; for release in $(CUDA_TORCHES); do \
		.venv-cuda-$$release/bin/python -m pytest -m cuda_build tests/runtime/test_cuda_build.py; done

# On a machine with one GPU and PyTorch, and no index: kernels, rings, memory and predicted times in under eight minutes, as
# device-check.json and a page. Packages that it lacks come from build/wheels, which `make device-wheels` fills elsewhere.
DEVICE           ?= cuda
DEVICE_OUTPUT    ?= build/device-check
DEVICE_PYTHON    ?= 3.12
DEVICE_PACKAGES  ?= imagesize msgspec rich typer

device-check:
	$(PYTHON) -m benchmarks.device_check --device $(DEVICE) --output $(DEVICE_OUTPUT)

device-wheels: $(STAMP)
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version $(DEVICE_PYTHON) --implementation cp \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
		--constraint constraints.txt --dest build/wheels $(DEVICE_PACKAGES)

# Training loops of other projects under a plan. DeepSpeed builds no kernels: CPU ranks need none. By uv, since pip takes hours
# to find releases that all of them allow.
LOOPS_VENV  ?= .venv-loops
LOOPS_STAMP := $(LOOPS_VENV)/.installed

$(LOOPS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LOOPS_VENV)
	$(LOOPS_VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(LOOPS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch setuptools wheel uv
	DS_BUILD_OPS=0 $(LOOPS_VENV)/bin/uv pip install --quiet --python $(LOOPS_VENV)/bin/python --constraint constraints.txt \
		--no-build-isolation-package deepspeed --editable ".[torch,hf,finetune,report]" --group dev --group loops
	touch $(LOOPS_STAMP)

test-loops: $(LOOPS_STAMP) test-frameworks
	$(LOOPS_VENV)/bin/python -m pytest $(WORKERS) -m loops --durations=20

# Frameworks around transformers' Trainer, each in an environment of its own: they pin releases that exclude each other. The
# index's torchvision and torchaudio load libraries of CUDA, which torch for CPUs lacks; text needs neither. With pictures,
# LLaMA-Factory needs a newer transformers than it allows, whose encoders' outputs can be given to the model.
FRAMEWORKS        := llama_factory llama_factory_pictures ms_swift trl_scripts axolotl
llama_factory_is  := llamafactory==0.9.5
ms_swift_is       := ms-swift==4.6.0
trl_scripts_is    := trl==1.16.0 rich pillow
axolotl_is        := axolotl==0.19.0
llama_factory_pictures_is   := $(llama_factory_is)
llama_factory_pictures_then := transformers==5.23.0

.venv-loops-%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(@D)/bin/python -m pip install --quiet --constraint constraints.txt torch setuptools wheel uv
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python --constraint constraints.txt $($*_is) \
		--editable ".[torch,finetune,report]" --group dev
	$(if $($*_then),$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python $($*_then))
	$(@D)/bin/uv pip uninstall --quiet --python $(@D)/bin/python torchvision
	rm -rf $(@D)/lib/python*/site-packages/torchaudio/lib
	touch $@

test-frameworks: $(FRAMEWORKS:%=.venv-loops-%/.installed)
	set -e; for name in $(FRAMEWORKS); do \
		.venv-loops-$$name/bin/python -m pytest -m loops -W default -p no:anyio -k $$name --durations=5 \
			tests/runtime/loops/test_frameworks.py $$(ls tests/runtime/loops/test_$$name*.py 2>/dev/null); done

# The tests of Megatron on a newer megatron-core, which needs Python 3.12 or newer: make test-megatron-next PYTHON=python3.12
NEXT_MEGATRON ?= 0.19.2
NEXT_VENV     ?= .venv-megatron-next
NEXT_STAMP    := $(NEXT_VENV)/.installed

$(NEXT_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "megatron-core $(NEXT_MEGATRON) needs Python 3.12: PYTHON=python3.12")'
	$(PYTHON) -m venv $(NEXT_VENV)
	$(NEXT_VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	grep -v megatron-core constraints.txt > $(NEXT_VENV)/constraints.txt
	$(NEXT_VENV)/bin/python -m pip install --quiet --constraint $(NEXT_VENV)/constraints.txt \
		--editable ".[torch,hf,megatron]" megatron-core==$(NEXT_MEGATRON) --group dev
	touch $(NEXT_STAMP)

test-megatron-next: $(NEXT_STAMP)
	$(NEXT_VENV)/bin/python -m pytest -m "megatron and not full" tests/runtime/megatron --durations=10

# The planner, the commands and the core of the runtime on other Pythons, with the newest and, on the first, the lowest declared
# versions: environments by uv, one after the other. Pythons that the machine lacks are skipped with a line. About an hour.
MATRIX_PYTHONS ?= python3.10 python3.12 python3.13
MATRIX_VENVS   ?= .venv-matrix

test-matrix: $(STAMP)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/python -m tests.matrix $(MATRIX_VENVS) $(MATRIX_PYTHONS) -- $(WORKERS)

# Tests of the compiled planner with every array index checked; in a cache of its own, since numba's index of what it compiled
# does not tell kernels with checks from others.
test-bounds: $(STAMP)
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(CURDIR)/.pytest_cache/kernels-with-checks $(BIN)/python -m pytest -m boundscheck tests/planning

# Every combination of what `make test` covers by examples, among them some sixty families of models.
test-full: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS) -m full --durations=20

# Changed inputs of every kind, 20,000 of them, through what reads them, in two processes; a quarter of an hour on two free cores.
FUZZ ?= 20000
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz $(FUZZ)

# One fault in each of 200 real jobs of four ranks, which must end, resume, and equal an undisturbed job in every bit; under an hour
# on two free cores. A full disk and a stalled network need root, and are skipped without.
CHAOS ?= 200
chaos: $(STAMP)
	$(BIN)/python -m tests.chaos $(CHAOS)

# Twenty faults, each put into a copy of the runtime and found by `fcp verify` or a short test; some four minutes.
mutations: $(STAMP)
	$(BIN)/python -m tests.mutations

# 204 steps of fixed lengths and prices, planned by this checkout and by AGAINST=../another one: worst regression and mean; about two minutes.
held: $(STAMP)
	$(BIN)/python -m benchmarks.held_cells --against $(AGAINST)

# Every causal language model of the installed transformers, tiny: exact under a plan, refused in a line, or wrong; prints the table of
# docs/reference/models.md. Some ten minutes.
families: $(STAMP)
	$(BIN)/python -m tests.every_family

clean:
	rm -rf $(VENV) $(LOCKED_VENV) $(LOOPS_VENV) $(MATRIX_VENVS) $(MSRUN_VENV) $(NEXT_VENV) $(STORES_VENV) fcp-demo site
