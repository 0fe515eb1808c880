"""One seed for all that tests draw, ZERO_RECIPES_SEED; cases of `make grid`, and one file for what they count."""

import json
import os
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from zero_recipes.core.files import write_json
from zero_recipes.core.measured_on import hardware_facts, library_versions

SEED = int(os.environ.get("ZERO_RECIPES_SEED", 0))
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def draw(*about: Any) -> random.Random:
    return random.Random(repr((SEED, *about)))


def count(kind: str, name: str, **found: Any) -> None:
    """Into benchmarks/results/hostile.json, beside what it holds of other kinds and names."""
    document = json.loads((RESULTS / "hostile.json").read_text())
    found |= {"seed": SEED, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    document["kinds"].setdefault(kind, {})[name] = found
    write_result("hostile.json", document)


def write_result(name: str, document: dict[str, Any]) -> None:
    """Into benchmarks/results/, with the hardware and the versions."""
    write_json(RESULTS / name, document | {"hardware": hardware_facts("cpu"), "versions": library_versions()})


def grid(*values: Any) -> Any:
    """Parameters of a case that runs under `make grid` alone: a repetition of what others of its test show."""
    return pytest.param(*values, marks=pytest.mark.grid)
