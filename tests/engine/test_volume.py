"""What DeepSpeed really sends, by stage and micro steps."""

import json

import pytest

from tests.helpers.grid import grid
from tests.helpers.tiny import NEVER_KEPT, ROOT, write_recipe
from zero_recipes.theory.zero_paper import paper_volume


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("volume"))


@pytest.fixture(scope="module")
def measured(two, recipe, tmp_path_factory):
    """A function: metrics.json of a stage with micro steps and keys of zero_optimization."""

    def run(stage: int, accumulation: int, zero: dict) -> dict:
        config = json.loads((ROOT / "ds_configs" / f"zero{stage}.json").read_text())
        config["zero_optimization"] |= zero
        argv = [str(recipe), "--output_dir", str(tmp_path_factory.mktemp("out")), "--deepspeed", json.dumps(config)]
        argv += ["--gradient_accumulation_steps", str(accumulation), "--max_steps", "6"]  # stage 3 learns in the first
        return two.run("train", argv=argv)[0]["metrics"]

    return run


# Φ a step by DeepSpeed's source: stages 1 and 2 all-reduce gradients (2Φ, or 1Φ where each part goes to its owner
# alone; stage 2 at every micro step) and gather the parameters (1Φ); stage 3 gathers and reduces at every micro step,
# and gathers anew for backward what it does not keep
OWNERS = {"use_multi_rank_bucket_allreduce": False}


@pytest.mark.parametrize(
    ("stage", "accumulation", "zero", "wanted"),
    [
        grid(0, 2, {}, 2),
        (1, 2, {}, 2 + 1),
        (1, 1, OWNERS, 1 + 1),
        (2, 2, {}, 2 * 2 + 1),
        grid(2, 2, OWNERS, 2 * 1 + 1),
        (3, 2, NEVER_KEPT, 2 * (2 + 1)),
        (3, 2, {"stage3_param_persistence_threshold": 0}, 2 * (1 + 1)),
    ],
)
def test_each_step_sends_what_the_source_says(measured, stage, accumulation, zero, wanted):
    metrics = measured(stage, accumulation, zero)
    phi, sent = 2 * metrics["trainable_parameters"], metrics["communication_bytes_per_step"]
    assert paper_volume(sent) / phi == pytest.approx(wanted, rel=0.02)
    if zero is OWNERS:
        assert sent["reduce"] + sent.get("all_reduce", 0) == pytest.approx(sent["all_gather"] * accumulation, rel=0.05)
