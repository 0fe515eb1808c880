"""Shared fixtures. Groups of processes are started once for a pytest process and shared."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.group import Group, start_server
from tests.helpers.worker import remember
from zero_recipes.core.process import imported_for_good

CHEAP_FIRST = ("unit", "plan", "engine", "upstream", "launch")

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests never ask the hub
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several pytest processes share the cores: tiny models wait for threads
if sys.prefix != sys.base_prefix:
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{sys.prefix}/kernels")  # as in the Makefile
remember()
CACHE = tempfile.mkdtemp(prefix="datasets-")  # rows made by tests are not kept
os.environ["HF_DATASETS_CACHE"] = CACHE
os.environ["HF_MODULES_CACHE"] = f"{CACHE}/modules"  # transformers copies a model's code there, not atomically
# the same cases in every run, however busy the machine is
settings.register_profile("tests", deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
settings.load_profile("tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One process fails in seconds before what costs minutes begins; of several, none ends with a long file alone."""
    items.sort(key=lambda item: CHEAP_FIRST.index(item.path.parent.name), reverse=hasattr(config, "workerinput"))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    with imported_for_good():  # garbage collection goes past it: a seventh of the time of imports and of tests
        return (yield)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Before a test changes anything that ranks would inherit."""
    if any(item.path.parent.name != "unit" for item in session.items):
        start_server()


def pytest_unconfigure() -> None:
    shutil.rmtree(CACHE, ignore_errors=True)


class NotCompiled(Exception):
    """Kernels are missing, which DeepSpeed would compile within a test: ends pytest, with this message."""


@pytest.fixture(autouse=True)
def one_environment() -> Iterator[None]:
    """The same object in every test: datasets 5.2 (`map` with num_proc) replaces os.environ. rich reads the old one."""
    kept = os.environ
    yield
    os.environ = kept  # noqa: B003 - the very object


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(NotCompiled):
        report.ends_pytest = str(call.excinfo.value)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """`pytest.exit` in a process of pytest-xdist would be an INTERNALERROR of the one that started it, which gets the
    report, too."""
    if hasattr(report, "ends_pytest") and "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.exit(report.ends_pytest, returncode=1)


def _group(world_size: int):
    from zero_recipes.core.host import Host
    from zero_recipes.engine.kernels import missing

    ops = ["deepspeed_shm_comm", "cpu_adam"]
    if Host().libaio_headers():
        ops.append("async_io")
    if not_compiled := missing(ops, "cpu"):
        raise NotCompiled(f"DeepSpeed's {', '.join(not_compiled)} must be compiled first: make ops")
    group = Group(world_size)
    yield group
    group.close()


@pytest.fixture(scope="session")
def one():
    yield from _group(1)


@pytest.fixture(scope="session")
def two():
    yield from _group(2)


@pytest.fixture(scope="session")
def four():
    yield from _group(4)
