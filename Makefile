# Two commands on a fresh machine (Python >= 3.11 with its headers, git, a C++ compiler): make demo, make test.
PYTHON ?= python3
VENV := .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: setup ops demo docs reference test-fast test grid canary cuda-build lint clean

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.lock pyproject.toml scripts/check_machine.sh
	@sh scripts/check_machine.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

demo: setup
	@sh scripts/demo.sh

# The site, to be read from the disk: build/site/index.html. Needs its own lock file alone. A dead link, or a page that
# would load something from a network, fails it (scripts/site_links.py).
DOCS_VENV := .venv-docs

docs: $(DOCS_VENV)/.ready
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	@echo "the site: build/site/index.html"

$(DOCS_VENV)/.ready: docs/requirements.lock
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -r docs/requirements.lock
	@touch $@

# docs/codes.md, the tables of docs/metrics.md and docs/recipe.md, and the JSON schemas, written from the code. Exits 1
# where one of them changed.
reference: setup
	python scripts/reference.py

# DeepSpeed's kernels that the tests load, compiled once: async_io takes minutes, and only where libaio-dev is installed
OPS := deepspeed_shm_comm cpu_adam async_io

# Beside the environment that compiles them: kernels of one DeepSpeed are no other's (tests/conftest.py has the same).
# With their mark, in one folder: in the Docker image it is all of .venv that a user may write to.
KERNELS := $(VENV)/kernels
ops test grid: export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(KERNELS)

COMPILED := $(KERNELS)/.compiled

ops: setup
	@python -m zero_recipes.engine.kernels $(OPS)
	@mkdir -p $(KERNELS)
	@touch $(COMPILED)

$(COMPILED): $(VENV)/.ready
	@$(MAKE) --no-print-directory ops

# the tests of single functions, without a run
test-fast: setup
	python -m pytest -n logical --maxprocesses 4 --dist loadfile -m "not launch and not grid and not private" tests/unit

# All of them, in one queue: a process of pytest for each core, four at most. The longest files come first
# (tests/conftest.py).
JOBS ?= logical

test: $(COMPILED)
	python -m pytest -n $(JOBS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# whole grids and repetitions: minutes to an hour
grid: $(COMPILED)
	python -m pytest -m grid

# The newest releases of all libraries, whatever the ranges say, and what relies on their private parts: minutes of
# downloads. torch stays the tested one unless TORCH names another.
TORCH ?= 2.13.0
CANARY := .venv-canary

canary: export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(CANARY)/kernels
canary:
	$(PYTHON) -m venv --clear $(CANARY)
	$(CANARY)/bin/pip install --quiet --disable-pip-version-check torch==$(TORCH) \
		$$($(PYTHON) scripts/canary_requirements.py)
	$(CANARY)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	PATH=$(CURDIR)/$(CANARY)/bin:$$PATH $(CANARY)/bin/python -m zero_recipes.engine.kernels $(OPS)
	PATH=$(CURDIR)/$(CANARY)/bin:$$PATH $(CANARY)/bin/python -m pytest -m "private and not grid"

# torch's CUDA build on a machine without a GPU: all unit and planner tests, and a run of two processes. 3 GB of
# downloads. pip's own settings are left out: a folder of wheels that they name may hold a CPU build, which pip prefers.
CUDA_BUILD := .venv-cuda-build

cuda-build: export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(CUDA_BUILD)/kernels
cuda-build:
	$(PYTHON) -m venv --clear $(CUDA_BUILD)
	PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= $(CUDA_BUILD)/bin/pip install --quiet --disable-pip-version-check \
		-r requirements.lock
	$(CUDA_BUILD)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	$(CUDA_BUILD)/bin/python -c 'import torch; assert torch.version.cuda, torch.__version__'
	PATH=$(CURDIR)/$(CUDA_BUILD)/bin:$$PATH $(CUDA_BUILD)/bin/python -m zero_recipes.engine.kernels $(OPS)
	PATH=$(CURDIR)/$(CUDA_BUILD)/bin:$$PATH $(CUDA_BUILD)/bin/python -m pytest tests/unit tests/plan
	PATH=$(CURDIR)/$(CUDA_BUILD)/bin:$$PATH $(CUDA_BUILD)/bin/python -m pytest -m grid tests/launch/test_launchers.py -k trains_as_accelerate

lint: setup
	ruff check .
	ruff format --check .
	lint-imports

clean:
	rm -rf $(VENV) $(DOCS_VENV) $(CANARY) $(CUDA_BUILD) output build *.egg-info
