"""docs/found_faults.md and docs/gpu_readiness.md name, for every fault that was found, the test that holds it: each of
them exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("found_faults.md", "gpu_readiness.md")


def rows_of(page: str) -> list[str]:
    lines = (ROOT / "docs" / page).read_text().splitlines()
    return [line for line in lines if line.startswith("| ") and not line.startswith(("| Found", "| ---"))]


ROWS = [row for page in PAGES for row in rows_of(page)]
NAMED = sorted({name for row in ROWS for name in re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)", row)})


@cache
def defined_in(path: str) -> set[str]:
    """Every function of a test file, those of classes among them."""
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", NAMED)
def test_the_named_test_exists(name: str):
    path, _, function = name.partition("::")
    assert (ROOT / path).is_file()
    assert not function or function in defined_in(path)


def test_every_row_names_a_test_or_says_why_there_is_none():
    assert len(ROWS) > 120
    assert [row for row in ROWS if "`tests/" not in row and "not done" not in row and "docs/" not in row] == []
