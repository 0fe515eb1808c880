"""The textbook numbers, against values worked out by hand."""

import pytest

from zero_recipes.theory.zero_paper import communication_units, model_state_bytes, model_state_bytes_fp32, paper_volume

PYTHIA = 6_860_000_000


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 109.76), (1, 68.6), (2, 61.74), (3, 54.88)])
def test_pythia_on_two_ranks(stage, gigabytes):
    assert model_state_bytes(PYTHIA, 2, stage).total / 1e9 == pytest.approx(gigabytes, abs=1e-6)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 112), (1, 38.5), (2, 26.25), (3, 14)])
def test_seven_billion_on_eight_ranks(stage, gigabytes):
    assert model_state_bytes(7_000_000_000, 8, stage).total / 1e9 == pytest.approx(gigabytes, abs=1e-6)


@pytest.mark.parametrize(
    ("stage", "parts"),
    [(0, (2000, 2000, 12000)), (1, (2000, 2000, 3000)), (2, (2000, 500, 3000)), (3, (500, 500, 3000))],
)
def test_each_stage_shards_one_part_more(stage, parts):
    assert tuple(model_state_bytes(1000, 4, stage)) == parts


@pytest.mark.parametrize(
    ("stage", "parts"),
    [(0, (4000, 4000, 8000)), (1, (4000, 4000, 4000)), (2, (4000, 2000, 4000)), (3, (2000, 2000, 4000))],
)
def test_fp32_has_no_separate_master(stage, parts):
    assert tuple(model_state_bytes_fp32(1000, 2, stage)) == parts


def test_one_rank_shards_nothing():
    assert {model_state_bytes(1000, 1, stage).total for stage in range(4)} == {16000}


def test_frozen_weights_own_no_gradient_and_no_optimizer_state():
    assert tuple(model_state_bytes(1000, 2, 0, trainable=10)) == (2000, 20, 120)
    assert tuple(model_state_bytes(1000, 2, 3, trainable=10)) == (1000, 10, 60)


def test_an_uneven_split_is_not_rounded():
    assert model_state_bytes(7, 2, 3).params == 7.0
    assert model_state_bytes(7, 4, 3).params == 3.5


def test_communication_in_units_of_phi():
    assert [communication_units(stage) for stage in range(4)] == [2, 2, 2, 3]


def test_only_the_all_reduce_counts_twice():
    assert paper_volume({"all_reduce": 100, "all_gather": 10, "reduce_scatter": 1}) == 211
    assert paper_volume({}) == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 2, 1), "parameters"),
        ((-5, 2, 1), "parameters"),
        ((7e9, 2, 1), "parameters"),
        ((True, 2, 1), "parameters"),
        ((1000, 0, 1), "world_size"),
        ((1000, 2.0, 1), "world_size"),
        ((1000, 2, 4), "zero_stage"),
        ((1000, 2, -1), "zero_stage"),
        ((1000, 2, None), "zero_stage"),
        ((1000, 2, True), "zero_stage"),
        ((1000, 2, 1, 1001), "trainable"),
    ],
)
@pytest.mark.parametrize("formula", [model_state_bytes, model_state_bytes_fp32])
def test_nonsense_is_refused_by_name(formula, arguments, named):
    with pytest.raises(ValueError, match=named):
        formula(*arguments)


def test_communication_refuses_an_unknown_stage():
    with pytest.raises(ValueError, match="zero_stage"):
        communication_units(4)
