"""What DeepSpeed really sends, by stage and micro steps."""

import json

import pytest

from tests.helpers.seeded import grid
from tests.helpers.tiny import NEVER_KEPT, ROOT, write_recipe
from zero_recipes.theory.zero_paper import paper_volume

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
        (3, 2, NEVER_KEPT, 2 * (2 + 1)),  # after the first step, in which it learns
        (3, 2, {"stage3_param_persistence_threshold": 0}, 2 * (1 + 1)),
    ],
)
def test_each_step_sends_what_the_source_says(two, tmp_path, stage, accumulation, zero, wanted):
    config = json.loads((ROOT / "ds_configs" / f"zero{stage}.json").read_text())
    config["zero_optimization"] |= zero
    recipe = write_recipe(tmp_path, deepspeed=config, gradient_accumulation_steps=accumulation, max_steps=6)
    metrics = two.run("train", argv=[str(recipe), "--output_dir", str(tmp_path / "out")])[0]["metrics"]
    phi, sent = 2 * metrics["trainable_parameters"], metrics["communication_bytes_per_step"]
    assert paper_volume(sent) / phi == pytest.approx(wanted, rel=0.02)
    if zero is OWNERS:
        assert sent["reduce"] + sent.get("all_reduce", 0) == pytest.approx(sent["all_gather"] * accumulation, rel=0.05)
