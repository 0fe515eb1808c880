# Two commands on a fresh machine (Python >= 3.11 with its headers, git, a C++ compiler): make demo, make test.
PYTHON ?= python3
VENV := .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: setup ops demo docs test-fast test grid canary cuda-build lint clean

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.lock pyproject.toml scripts/check_machine.sh
	@sh scripts/check_machine.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

demo: setup
	@sh scripts/demo.sh

# The site, to be read from the disk: build/site/index.html. A dead link, or a page that would load something from a
# network, fails it (scripts/site_links.py).
docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 mkdocs build --strict
	@echo "the site: build/site/index.html"

$(VENV)/.docs: $(VENV)/.ready requirements-docs.lock
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-docs.lock
	@touch $@

# DeepSpeed's kernels that the tests load, compiled once: async_io takes minutes, and only where libaio-dev is installed
ops: setup
	@python -m zero_recipes.distributed.kernels deepspeed_shm_comm cpu_adam async_io

# the tests of single functions: one process, no run
test-fast: setup
	python -m pytest tests/unit

# All of them, in three queues at once: the ranks of a small job wait for each other and leave half of two cores idle.
# What the other queues print is shown at the end.
test: ops
	@mkdir -p build
	@python -m pytest tests/launch tests/engine/test_[r-t]*.py >build/launch.log 2>&1 & launch=$$!; \
	python -m pytest tests/unit tests/plan tests/engine/test_[u-z]*.py >build/unit.log 2>&1 & unit=$$!; \
	python -m pytest tests/upstream tests/engine/test_[a-q]*.py; code=$$?; \
	wait $$launch || code=$$?; wait $$unit || code=$$?; \
	cat build/launch.log build/unit.log; exit $$code

# whole grids and repetitions: minutes to an hour
grid: ops
	python -m pytest -m grid

# The newest releases of all libraries, whatever the ranges say, and what relies on their private parts: minutes of
# downloads. torch stays the tested one unless TORCH names another.
TORCH ?= 2.13.0
CANARY := .venv-canary

canary:
	$(PYTHON) -m venv --clear $(CANARY)
	$(CANARY)/bin/pip install --quiet --disable-pip-version-check torch==$(TORCH) \
		$$($(PYTHON) scripts/canary_requirements.py)
	$(CANARY)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	PATH=$(CURDIR)/$(CANARY)/bin:$$PATH $(CANARY)/bin/python -m pytest -m "private and not grid"

# torch's CUDA build on a machine without a GPU: preflight, device choice, plan and a run, all unit and planner tests
# under it; where there is nvcc, DeepSpeed's CUDA ops are compiled too. 3 GB of downloads. pip's own settings are left
# out: a folder of wheels that they name may hold a CPU build, which pip prefers.
CUDA_BUILD := .venv-cuda-build

cuda-build:
	$(PYTHON) -m venv --clear $(CUDA_BUILD)
	PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= $(CUDA_BUILD)/bin/pip install --quiet --disable-pip-version-check \
		-r requirements.lock
	$(CUDA_BUILD)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	$(CUDA_BUILD)/bin/python -c 'import torch; assert torch.version.cuda, torch.__version__'
	PATH=$(CURDIR)/$(CUDA_BUILD)/bin:$$PATH $(CUDA_BUILD)/bin/python -m pytest tests/unit tests/plan
	PATH=$(CURDIR)/$(CUDA_BUILD)/bin:$$PATH $(CUDA_BUILD)/bin/python -m pytest tests/launch/test_cuda_build.py -m ""

lint: setup
	ruff check .
	ruff format --check .
	lint-imports

clean:
	rm -rf $(VENV) $(CANARY) $(CUDA_BUILD) output build *.egg-info
