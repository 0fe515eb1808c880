"""The page of scenarios is made from its JSON, and the JSON is what the plan says."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from tests.helpers.plan_jobs import GB, ROOT, job, made_up
from zero_recipes.core.hardware import gpu_named, gpus
from zero_recipes.plan.formulas.predict import predict_by_formulas

CONTENT = json.loads((ROOT / "benchmarks" / "results" / "scenarios.json").read_text())
FOUND = CONTENT["scenarios"]


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


def test_the_sections_of_claims_are_what_the_formulas_say_today(scenarios, monkeypatch):
    monkeypatch.chdir(ROOT)
    fresh = json.loads(json.dumps(scenarios.claims.sections(scenarios.RECIPE)))
    assert fresh == {name: CONTENT[name] for name in fresh}, "run python scripts/scenarios.py --new --quick"


def test_the_papers_figure_is_the_papers_formula():
    """120 / 31.4 / 16.6 / 1.9 GB on 64 GPUs, within half of the last digit that is printed."""
    (figure,) = (row for row in CONTENT["states"] if row["who"].startswith("ZeRO paper"))
    for said, found in zip(figure["said_gb"], figure["formula_bytes"], strict=True):
        assert abs(said - found / 1e9) <= 0.05
    planned = zip(figure["peak_bytes"], figure["formula_bytes"], strict=True)
    assert all(peak > states for peak, states in planned)  # activations and copies come on top


def test_a_trillion_parameters_are_more_than_is_commonly_given():
    """20 GB of GPU, 400 GB of host memory and 2 TB of NVMe: the weights alone are 2 TB, 18 bytes each go to NVMe."""
    found = CONTENT["infinity"]
    psi = found["states_bytes"] / 16
    assert found["nodes"] * found["nvme_bytes_of_a_node"] == pytest.approx(18 * psi, rel=1e-3)
    assert found["host_bytes_of_a_node"] > 2 * psi / found["nodes"] > 400 * GB
    assert found["peak_bytes"] > 20 * GB


def test_activations_at_32_times_2048():
    """16-bit inputs of 32 layers of 4096: 17.2 GB; a layer at work comes on top, and whole they are over 300 GB."""
    found = CONTENT["activations"]
    assert found["inputs_of_layers"] == 32 * 2 * 32 * 2048 * 4096
    assert found["inputs_of_layers"] < found["recomputed"] < 30 * GB < 300 * GB < found["kept"]


def test_what_is_recommended_follows_the_rules_of_today(monkeypatch):
    """Rows by the engine, too: the chart read off the numbers that stand in the JSON."""
    from tests.plan.test_choice import loaded_chart, read_off

    chart = loaded_chart()
    for row in FOUND:
        rows = [{"strategy": name, **found} for name, found in row["strategies"].items()]
        assert read_off(chart, rows, row["gpu_memory_bytes"]) == row["recommended"], row["model"]


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
