"""ZeRO++ on four processes that stand for two nodes of two: losses, and what still crosses between the nodes."""

import functools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import family_cases
from tests.helpers.quantizer_on_cpu import refuse_reduced, refuse_swizzled
from tests.helpers.seeded import grid
from tests.helpers.tiny import NEVER_KEPT, ROOT, write_model, write_recipe
from zero_recipes.core.zero_paper import PLUS_PLUS, paper_volume, plus_plus_units
from zero_recipes.engine.faults.quantized_gradients import quantized_shape

STEPS = 6
LOSS_GAP = 0.02  # of the loss, for int8 weights and int4 gradients; hpZ moves no number
MAGNITUDES = [1e-9, 1e-8, 1e-7, 3e-7, 1e-6, 1e-5, 1e-3, 0.1, 10.0, 1e3, 1e5]


# sizes of which DeepSpeed's CUDA op quantizes every matrix, and sizes of which it can quantize few
SIZES = {
    "even": {"hidden": 256, "intermediate": 256, "vocabulary": 1408},
    "odd": {"hidden": 128, "intermediate": 512, "vocabulary": 1382},
}


@pytest.fixture(scope="module")
def runs(four, tmp_path_factory):
    """A function: the result of a strategy on a model of SIZES."""
    folder = tmp_path_factory.mktemp("plus_plus")

    @functools.cache
    def run(strategy: str, sizes: str) -> dict:
        model = write_model(folder / f"{sizes}_model", **SIZES[sizes])
        keys = {"model_name_or_path": str(model), "max_steps": STEPS, "max_grad_norm": 1.0}
        recipe = write_recipe(folder / sizes, **keys)
        config = json.loads((ROOT / "ds_configs" / f"{strategy}.json").read_text())
        config["zero_optimization"] |= NEVER_KEPT
        argv = [str(recipe), "--output_dir", str(folder / sizes / strategy), "--deepspeed", json.dumps(config)]
        result = four.run(family_cases.train_on_two_nodes, argv=argv)[0]
        assert result["metrics"]["strategy"] == strategy
        return result

    return lambda strategy, sizes="even": run(strategy, sizes)


def test_hpz_has_the_losses_of_stage_3_from_groups_of_its_own_and_a_copy_of_the_weights_in_each_node(runs):
    """2Ψ divided by the processes of a node, beside the 2Ψ divided by all."""
    assert runs("zero3")["hpz_groups"] == [[1, 4]] and runs("zero3_hpz")["hpz_groups"] == [[2, 2]]
    plain, copied = (runs(name)["metrics"] for name in ("zero3", "zero3_hpz"))
    assert copied["loss_history"] == plain["loss_history"]
    more = copied["model_state_bytes"][0]["params"] - plain["model_state_bytes"][0]["params"]
    assert more == pytest.approx(2 * plain["parameters"] / 2, rel=0.02)


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [grid("zero3_qwz", "even"), ("zero3_qgz", "even"), grid("zero3_plus_plus", "even"), grid("zero3_qgz", "odd")],
)
def test_quantised_losses_and_norms_stay_within_the_bound(runs, strategy, sizes):
    """A sum where a mean belongs would be twice the norm, and Adam would hide it from the losses."""
    plain, quantised = (runs(name, sizes)["metrics"] for name in ("zero3", strategy))
    pairs = zip(plain["loss_history"], quantised["loss_history"], strict=True)
    assert 0 < max(abs(a - b) / abs(a) for a, b in pairs) < LOSS_GAP
    assert quantised["loss_history"][-1] < quantised["loss_history"][0] - 0.3
    assert quantised["grad_norm_history"] == pytest.approx(plain["grad_norm_history"], rel=0.15)


def test_the_share_of_gradients_that_is_not_quantised_is_measured(runs):
    """Of the odd model, only the matrices of 128 x 512 are handed over: both of both layers' MLPs."""
    share = runs("zero3_qgz", "odd")["metrics"]["gradients_not_quantized"]
    parameters = runs("zero3_qgz", "odd")["metrics"]["parameters"]
    assert share == pytest.approx(1 - 4 * 128 * 512 / parameters)
    assert runs("zero3_qgz")["metrics"]["gradients_not_quantized"] < 0.01  # vectors
    assert runs("zero3")["metrics"]["gradients_not_quantized"] is None


@given(
    shape=st.lists(st.sampled_from([8, 96, 128, 136, 256, 768, 1382, 4096, 50_257]), min_size=1, max_size=3),
    nodes=st.integers(2, 6),
    devices=st.integers(1, 8),
)
def test_what_is_handed_over_the_kernel_takes(shape, nodes, devices):
    """Through the sizes of all three kernels, as DeepSpeed calls them (`all_to_all_quant_reduce`)."""
    world, size = nodes * devices, math.prod(shape)
    taken = quantized_shape(shape, world)
    if taken is None:
        return
    assert math.prod(taken) == size and size < 2**31
    groups = max(*taken, world)
    refuse_swizzled(size, groups, nodes, devices)
    refuse_reduced(size // devices, groups // devices)


@pytest.mark.parametrize(
    ("shape", "world", "taken"),
    [
        ((4096, 4096), 8, (65536, 256)),
        ((32_001, 4096), 8, (512_016, 256)),  # no whole rows for a rank, but whole groups
        ((128, 2048, 768), 16, (786_432, 256)),  # experts in one tensor
        ((50_257, 768), 8, None),  # GPT-2's embedding
        ((4096, 4096), 6, None),  # a world with a factor 3
        ((1536, 1536), 24, (9216, 256)),
        ((1382, 128), 4, None),
        ((160, 160), 4, (160, 160)),  # below 65,536 elements: rows are groups
        ((128, 384), 4, None),  # groups of 128
        ((4096,), 8, None),
        ((262_144, 8192), 8, None),  # 2^31
    ],
)
def test_gradients_are_handed_over_as_rows_of_256_where_they_divide(shape, world, taken):
    assert quantized_shape(shape, world) == taken


@pytest.mark.parametrize("strategy", ["zero3", "zero3_hpz", grid("zero3_qwz"), "zero3_qgz", grid("zero3_plus_plus")])
def test_what_crosses_between_nodes_is_what_the_paper_says(runs, strategy):
    metrics = runs(strategy)["metrics"]
    phi = 2 * metrics["trainable_parameters"]
    paper = plus_plus_units(PLUS_PLUS.get(strategy, ()))
    assert paper_volume(metrics["communication_bytes_between_nodes"]) / phi == pytest.approx(paper, rel=0.08)


@pytest.fixture(scope="module")
def ranges(four) -> list[dict]:
    return four.run(family_cases.quantized_ranges, magnitudes=MAGNITUDES, seed=11)


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
