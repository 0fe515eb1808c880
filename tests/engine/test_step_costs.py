"""What a step waits for that does not log: on a GPU each wait leaves the device without work."""

import pytest

from tests.helpers import step_costs
from tests.helpers.seeded import grid
from tests.helpers.tiny import arguments, write_recipe

# where they wait for nothing: the collator has the rows on the host, and only CPUs compute packs row by row
ON_THE_HOST = {"trl/trainer/sft_trainer.py:torch_call", "zero_recipes/engine/attention.py:_by_row"}
EVERY_STEP = {"zero_recipes/metrics/callback.py:_bring_losses_together": 1}  # losses, norms, signals of all ranks
SKIPS = {"deepspeed/runtime/utils.py:is_invalid_grad_norm": 1}  # whether DeepSpeed skips the step


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_step_that_does_not_log_waits_for_the_device_only_where_it_must(one, tmp_path, strategy):
    recipe = write_recipe(tmp_path, max_steps=3, logging_steps=100, packing=True, per_device_train_batch_size=1)
    argv = arguments(recipe, strategy, tmp_path / "out")
    found = one.run(step_costs.costs_of_steps, argv=argv)[0]["costs"][-1]["waits"]
    assert {place: count for place, count in found.items() if place not in ON_THE_HOST} == EVERY_STEP | SKIPS


KEYS = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "max_steps": 3, "logging_steps": 100}


CHANGES = [grid("zero2", "copies"), ("zero3", "copies"), ("zero3", "each"), grid("zero3", "norm")]


@pytest.mark.parametrize(("strategy", "change"), CHANGES)
def test_a_step_of_fewer_kernels_trains_the_same(one, tmp_path, strategy, change):
    """Gradients that are not copied side by side before they are reduced, and by one call after; norms by one call."""
    argv = arguments(write_recipe(tmp_path, **KEYS), strategy, tmp_path / "out", "--overwrite", "true")
    few = one.run(step_costs.costs_of_steps, argv=argv)[0]
    many = one.run(step_costs.costs_of_steps, argv=argv, off=[change])[0]
    assert few["losses"] == many["losses"] and len(few["losses"]) == 3
    assert few["costs"][-1]["kernels"] < many["costs"][-1]["kernels"]


def test_stage_3_has_torchs_linear_layers_where_no_gathered_weight_is_held_longer(one, tmp_path):
    recipe = write_recipe(tmp_path, **KEYS | {"bf16": False})
    argv = arguments(recipe, "zero3", tmp_path / "out", "--overwrite", "true")
    found = one.run(step_costs.costs_of_steps, argv=argv)[0]
    before = one.run(step_costs.costs_of_steps, argv=argv, off=["linear"])[0]
    assert found["losses"] == pytest.approx(before["losses"], rel=1e-6)
    assert found["costs"][-1]["kernels"] < before["costs"][-1]["kernels"], "biases are added within the product"
