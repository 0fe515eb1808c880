"""The textbook numbers, against values worked out by hand."""

import pytest

from zero_recipes.theory.zero_paper import FP32, communication_units, model_state_bytes, paper_volume

PYTHIA = 6_860_000_000


@pytest.mark.parametrize(
    ("parameters", "ranks", "gigabytes"),
    [(PYTHIA, 2, (109.76, 68.6, 61.74, 54.88)), (7_000_000_000, 8, (112, 38.5, 26.25, 14))],
)
def test_model_states_of_each_stage(parameters, ranks, gigabytes):
    found = [model_state_bytes(parameters, ranks, stage).total / 1e9 for stage in range(4)]
    assert found == pytest.approx(gigabytes, abs=1e-6)


@pytest.mark.parametrize(
    ("stage", "mixed", "fp32"),
    [
        (0, (2000, 2000, 12000), (4000, 4000, 8000)),
        (1, (2000, 2000, 3000), (4000, 4000, 2000)),
        (2, (2000, 500, 3000), (4000, 1000, 2000)),
        (3, (500, 500, 3000), (1000, 1000, 2000)),
    ],
)
def test_each_stage_shards_one_part_more_and_fp32_has_no_separate_master(stage, mixed, fp32):
    assert model_state_bytes(1000, 4, stage) == mixed and model_state_bytes(1000, 4, stage, each=FP32) == fp32


def test_frozen_weights_own_no_gradient_and_no_optimizer_state():
    assert model_state_bytes(1000, 2, 0, trainable=10) == (2000, 20, 120)
    assert model_state_bytes(1000, 2, 3, trainable=10) == (1000, 10, 60)
    assert model_state_bytes(7, 4, 3).params == 3.5  # an uneven split is not rounded


def test_communication_in_units_of_phi_with_the_all_reduce_twice():
    assert [communication_units(stage) for stage in range(4)] == [2, 2, 2, 3]
    assert paper_volume({"all_reduce": 100, "all_gather": 10, "reduce_scatter": 1}) == 211
