"""The court of planners: its rows are whole, and its page is what its predictions give."""

import pytest

from benchmarks.planners import court, score
from zero_recipes.plan.formulas import predict_by_formulas

ROWS = court.read_rows()


@pytest.mark.parametrize("row", ROWS[:: len(ROWS) // 5], ids=lambda row: row["id"])
def test_a_row_becomes_a_job_of_the_planner(row):
    job = court.job_of_row(row)
    assert job.world_size == row["gpus"] and job.settings.max_length == row["recipe"]["max_length"]
    assert job.settings.use_peft == (row["method"] != "full")


def test_errors_are_predicted_over_measured():
    found = {"source": "engine", "allocated": 11 * 10**9, "reserved": 12 * 10**9, "device": {"low": 13 * 10**9}}
    row = ROWS[0] | {"id": "x", "measured": 10, "unit": "GB", "found": found | {"others": {"a": 5 * 10**9, "b": None}}}
    by_reading = {"allocated": 0.1, "reserved": 0.2, "not stated": 0.3}
    for read, error in by_reading.items():
        assert score.errors(row | {"read": read}) == pytest.approx({score.OURS: error, "a": -0.5})


def by_formulas(name):
    (row,) = [row for row in ROWS if row["id"] == name]
    return predict_by_formulas(court.job_of_row(row))


def test_formulas_take_pure_bf16_and_plain_adams_list_for_what_they_are():
    """Weights, gradients, Adam's two states and its list of intermediates, each 2 bytes, on two ranks."""
    found = by_formulas("fms-mistral-fsdp-full-2")
    assert found.allocated_peak_bytes == pytest.approx(10 * found.parameters / 2, rel=1e-3)
    assert found.peak_phase == "step"


def test_formulas_pack_the_weights_under_fsdp_too():
    found = by_formulas("peft-70b-qlora-fsdp")
    assert found.model_state_bytes.params == pytest.approx(0.576 * found.parameters / 2, rel=0.02)
