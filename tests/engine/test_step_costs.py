"""What a step waits for that does not log: on a GPU each wait leaves the device without work."""

from tests.helpers import step_costs
from tests.helpers.tiny import arguments, write_recipe

# where they wait for nothing: the collator has the rows on the host, and only CPUs compute packs row by row
ON_THE_HOST = {"trl/trainer/sft_trainer.py:torch_call", "zero_recipes/engine/attention.py:_by_row"}
EVERY_STEP = {"zero_recipes/metrics/callback.py:_bring_losses_together": 1}  # losses, norms, signals of all ranks
SKIPS = {"deepspeed/runtime/utils.py:is_invalid_grad_norm": 1}  # whether DeepSpeed skips the step


def test_a_step_that_does_not_log_waits_for_the_device_only_where_it_must(one, tmp_path):
    recipe = write_recipe(tmp_path, max_steps=3, logging_steps=100, packing=True, per_device_train_batch_size=1)
    argv = arguments(recipe, "zero2", tmp_path / "out")
    found = one.run(step_costs.costs_of_steps, argv=argv)[0]["costs"][-1]["waits"]
    assert {place: count for place, count in found.items() if place not in ON_THE_HOST} == EVERY_STEP | SKIPS


def test_one_process_copies_no_gradients_side_by_side_and_trains_the_same(one, tmp_path):
    keys = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "max_steps": 3, "logging_steps": 100}
    argv = arguments(write_recipe(tmp_path, **keys), "zero2", tmp_path / "out", "--overwrite", "true")
    apart = one.run(step_costs.costs_of_steps, argv=argv)[0]
    copied = one.run(step_costs.costs_of_steps, argv=argv, off=["copies"])[0]
    assert apart["losses"] == copied["losses"] and len(apart["losses"]) == 3
    assert apart["costs"][-1]["kernels"] < copied["costs"][-1]["kernels"]
