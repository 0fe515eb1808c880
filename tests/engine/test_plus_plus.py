"""ZeRO++ on four processes that stand for two nodes of two: losses, and what still crosses between the nodes."""

import functools
import json

import pytest

from tests.helpers.seeded import grid
from tests.helpers.tiny import NEVER_KEPT, ROOT, write_model, write_recipe
from zero_recipes.theory.zero_paper import PLUS_PLUS, paper_volume, plus_plus_units

STEPS = 6
LOSS_GAP = 0.02  # of the loss, for int8 weights and int4 gradients; hpZ moves no number
MAGNITUDES = [1e-9, 1e-8, 1e-7, 3e-7, 1e-6, 1e-5, 1e-3, 0.1, 10.0, 1e3, 1e5]


@pytest.fixture(scope="module")
def runs(four, tmp_path_factory):
    """A function: the result of a strategy. Sizes divide: the CUDA op takes multiples of 8 and of twice the world."""
    folder = tmp_path_factory.mktemp("plus_plus")
    model = write_model(folder / "even", hidden=64, intermediate=128, vocabulary=1408)
    recipe = write_recipe(folder, model_name_or_path=str(model), max_steps=STEPS, max_grad_norm=1.0)

    @functools.cache
    def run(strategy: str) -> dict:
        config = json.loads((ROOT / "ds_configs" / f"{strategy}.json").read_text())
        config["zero_optimization"] |= NEVER_KEPT
        argv = [str(recipe), "--output_dir", str(folder / strategy), "--deepspeed", json.dumps(config)]
        result = four.run("family_cases.train_on_two_nodes", argv=argv)[0]
        assert result["metrics"]["strategy"] == strategy
        return result

    return run


def test_hpz_has_the_losses_of_stage_3_from_groups_of_its_own_and_a_copy_of_the_weights_in_each_node(runs):
    """2Ψ divided by the processes of a node, beside the 2Ψ divided by all."""
    assert runs("zero3")["hpz_groups"] == [[1, 4]] and runs("zero3_hpz")["hpz_groups"] == [[2, 2]]
    plain, copied = (runs(name)["metrics"] for name in ("zero3", "zero3_hpz"))
    assert copied["loss_history"] == plain["loss_history"]
    more = copied["model_state_bytes"][0]["params"] - plain["model_state_bytes"][0]["params"]
    assert more == pytest.approx(2 * plain["parameters"] / 2, rel=0.02)


@pytest.mark.parametrize("strategy", [grid("zero3_qwz"), "zero3_qgz", "zero3_plus_plus"])
def test_quantised_losses_and_norms_stay_within_the_bound(runs, strategy):
    """A sum where a mean belongs would be twice the norm, and Adam would hide it from the losses."""
    plain, quantised = (runs(name)["metrics"] for name in ("zero3", strategy))
    pairs = zip(plain["loss_history"], quantised["loss_history"], strict=True)
    assert 0 < max(abs(a - b) / abs(a) for a, b in pairs) < LOSS_GAP
    assert quantised["loss_history"][-1] < quantised["loss_history"][0] - 0.3
    assert quantised["grad_norm_history"] == pytest.approx(plain["grad_norm_history"], rel=0.15)


@pytest.mark.parametrize("strategy", ["zero3", "zero3_hpz", grid("zero3_qwz"), "zero3_qgz", "zero3_plus_plus"])
def test_what_crosses_between_nodes_is_what_the_paper_says(runs, strategy):
    metrics = runs(strategy)["metrics"]
    phi = 2 * metrics["trainable_parameters"]
    parts = PLUS_PLUS.get(strategy, {"hpz": False, "qwz": False, "qgz": False})
    paper = plus_plus_units(**parts)
    assert paper_volume(metrics["communication_bytes_between_nodes"]) / phi == pytest.approx(paper, rel=0.08)


@pytest.fixture(scope="module")
def ranges(four) -> list[dict]:
    return four.run("family_cases.quantized_ranges", magnitudes=MAGNITUDES, seed=11)


def test_quantised_gradients_are_as_exact_at_every_size(ranges):
    """int4 costs the same share of a small gradient and of a large one; fp16's own range does not show."""
    for rank in ranges:
        for dtype, errors in rank["errors"].items():
            after = [gaps[1] for size, gaps in errors.items() if dtype != "float16" or 1e-7 <= float(size) <= 1e3]
            assert max(after) < 0.25 and (dtype == "float16" or max(after) < 1.2 * min(after)), (dtype, errors)


@pytest.mark.private
def test_the_cast_to_fp16_alone_still_loses_small_and_large_gradients(ranges):
    """Fails when DeepSpeed's qgZ reads more than fp16: then the scale of patch_quantized_gradients may go."""
    for rank in ranges:
        before = {magnitude: gaps[0] for magnitude, gaps in rank["errors"]["bfloat16"].items()}
        assert before["1e-08"] > 0.9 and before["100000"] > 0.9 and before["0.001"] < 0.25, before


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_one_ranks_infinity_reaches_every_rank_through_int4(ranges, value):
    """And no other tensor of the bucket: the check for overflow sees it, and the stop at a norm of NaN."""
    assert [rank[value] for rank in ranges] == [[False, True]] * 4
