# Two commands on a fresh machine (Python >= 3.11 with its headers, git, a C++ compiler): make demo, make test.
PYTHON ?= python3
VENV := .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: setup ops demo test grid lint clean

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.lock pyproject.toml scripts/check_machine.sh
	@sh scripts/check_machine.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

demo: setup
	@sh scripts/demo.sh

# DeepSpeed's kernels that the tests load, compiled once: async_io takes minutes, and only where libaio-dev is installed
ops: setup
	@python -m zero_recipes.distributed.kernels deepspeed_shm_comm cpu_adam async_io

test: ops
	python -m pytest

# whole grids and repetitions: minutes to an hour
grid: ops
	python -m pytest -m grid

lint: setup
	ruff check .
	ruff format --check .
	lint-imports

clean:
	rm -rf $(VENV) output build *.egg-info
