"""Shared fixtures. Fast tests run first; launched groups of processes are made once and shared."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pytest

from tests.helpers.group import Group

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT.parent / "shared" / "fixtures"

# from cheap to dear; a file that is not named here runs with the fast ones
ORDER = [
    "test_recipes",
    "test_checks",
    "test_audit",
    "test_preparation",
    "test_combinations",
    "test_packing",
    "test_refusals",
    "test_reshard_files",
    "test_model_states",
    "test_metrics",
    "test_volume",
    "test_plan_surprises",
    "test_plan_accuracy",
    "test_plan_runs",
    "test_equality",
    "test_infinity",
    "test_plus_plus",
    "test_fsdp",
    "test_ulysses",
    "test_parallelism",
    "test_resume",
    "test_equivalence",
    "test_weighting",
    "test_loading",
    "test_combinations_unchecked",
    "test_saving",
    "test_trl_recipes",
    "test_qlora",
    "test_reshard",
    "test_real_weights",
    "test_rendezvous",
    "test_machines",
    "test_failures",
    "test_kills",
    "test_launchers",
    "test_clean_ending",
]

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests never ask the hub
CACHE = tempfile.TemporaryDirectory(prefix="datasets-")  # rows made by tests are not kept
os.environ["HF_DATASETS_CACHE"] = CACHE.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.index(item.path.stem) if item.path.stem in ORDER else -1)


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays: collecting goes past it, which saves a seventh of the time in this process


def _group(world_size: int):
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


@pytest.fixture(scope="session")
def fixtures() -> Path:
    if not FIXTURES.is_dir():
        pytest.skip(f"the shared fixtures (real weights, real Alpaca rows) are not at {FIXTURES}")
    return FIXTURES
