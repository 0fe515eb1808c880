"""Formulas beside peaks that others have published."""

import pytest

from benchmarks.planners import court
from zero_recipes.plan.formulas import predict_by_formulas

ROWS = court.read_rows()


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
