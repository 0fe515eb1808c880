"""The page of scenarios is made from its JSON, and the JSON is what the plan says."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from tests.helpers.plan_jobs import GB, ROOT, job, made_up
from zero_recipes.core.hardware import gpu_named, gpus
from zero_recipes.planner.formulas.predict import predict_by_formulas

FOUND = json.loads((ROOT / "benchmarks" / "results" / "scenarios.json").read_text())["scenarios"]


@pytest.fixture(scope="module")
def scenarios():
    spec = importlib.util.spec_from_file_location("scenarios", ROOT / "scripts" / "scenarios.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["scenarios"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["scenarios"]


def test_the_page_is_what_the_json_says(scenarios):
    assert scenarios.main(["--check"]) == 0, "run python scripts/scenarios.py"
    assert [row["model"] for row in FOUND] == [scenario.model for scenario in scenarios.SCENARIOS]
    assert {row["source"] for row in FOUND} <= {"engine", "formulas"}


def test_rows_by_formulas_are_what_the_formulas_say_today(scenarios, monkeypatch):
    monkeypatch.chdir(ROOT)
    for row, scenario in zip(FOUND, scenarios.SCENARIOS, strict=True):
        if row["source"] == "formulas":
            fresh = json.loads(json.dumps(scenarios.planned(scenario, predict_by_formulas)))
            assert fresh == row, "run python scripts/scenarios.py"


def test_the_smallest_machine_is_a_power_of_two_and_too_small_ones_are_not_asked(scenarios):
    asked = []

    def predict(given):
        asked.append(given.world_size)
        return made_up(given, (70 if given.world_size >= 16 else 90) * GB)

    gpu = gpu_named("h100-80gb", gpus())
    found = scenarios.stage_3_from(lambda count: job("zero3", count), gpu, predict, psi=20 * GB)
    assert found == 16 and asked == [4, 8, 16]  # 16 bytes x 20e9 are 320 GB: two GPUs cannot hold them
    hopeless = scenarios.stage_3_from(lambda count: job("zero3", count), gpu, lambda j: made_up(j, 90 * GB), psi=GB)
    assert hopeless is None
