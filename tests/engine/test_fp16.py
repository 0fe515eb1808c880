"""fp16 with loss scaling through the real engine: what an overflow skips, and what it leaves as it was."""

import json

import pytest

from tests.helpers import step_cases
from tests.helpers.tiny import ROOT, write_recipe

STEPS = 6
STRATEGIES = [  # stages 1 and 2 share an optimizer; what offloads does in fp16 what it does in memory
    *("zero2", "zero3", "zero2_offload"),
    *(pytest.param(each, marks=pytest.mark.grid) for each in ("zero1", "zero3_offload")),
]


def fp16(strategy: str, **keys) -> str:
    config = json.loads((ROOT / "ds_configs" / f"{strategy}.json").read_text())
    return json.dumps(config | {"fp16": config["fp16"] | keys})


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp16")
    return write_recipe(folder, bf16=False, fp16=True, max_steps=STEPS, lr_scheduler_type="linear")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_overflow_skips_the_step_halves_the_scale_and_changes_nothing_else(two, recipe, tmp_path, strategy):
    argv = [str(recipe), "--output_dir", str(tmp_path), "--deepspeed"]
    argv.append(fp16(strategy, initial_scale_power=18, hysteresis=1))
    ranks = two.run(step_cases.train_in_fp16, argv=argv)
    scale, rate = 2.0**18, 1e-3
    for number, step in enumerate(ranks[0]["steps"]):
        assert step["skipped"] == step["same"], (number, step)  # weights, fp32 masters, Adam's states and its counter
        assert step["scale"] == (scale / 2 if step["skipped"] else scale), (number, step)
        assert (step["rate"] == rate) == step["skipped"], "a skipped step takes no step of the schedule"
        scale, rate = step["scale"], step["rate"]
    assert [rank["steps"] for rank in ranks] == [ranks[0]["steps"]] * 2, "all ranks skip together"
    metrics = ranks[0]["metrics"]
    skipped = [step["skipped"] for step in ranks[0]["steps"]]
    assert 0 < sum(skipped) < STEPS and metrics["skipped_steps"] == sum(skipped)
    assert [norm is None for norm in metrics["grad_norm_history"]] == skipped
    assert metrics["status"] == "ok" and metrics["precision"] == "fp16" and metrics["loss_history"][-1] < 6.9


@pytest.mark.private
def test_stage_0_in_fp16_still_does_not_train(two, recipe, tmp_path):
    """Fails when DeepSpeed scales the loss at stage 0 (engine.py, `backward`): then remove ZR271."""
    argv = [str(recipe), "--output_dir", str(tmp_path), "--deepspeed", fp16("zero0", initial_scale_power=34)]
    ranks = two.run(step_cases.train_in_fp16, argv=argv)
    assert not any(step["skipped"] for step in ranks[0]["steps"]), "a loss times 2^34 would be beyond fp16"
    losses = ranks[0]["metrics"]["loss_history"]
    assert min(losses) > 6.9, "gradients divided by 2^34 move nothing"


def test_a_scale_at_its_minimum_ends_the_run_on_all_ranks(two, recipe, tmp_path):
    argv = [str(recipe), "--output_dir", str(tmp_path), "--deepspeed"]
    argv.append(fp16("zero2", initial_scale_power=34, min_loss_scale=2.0**33, hysteresis=1))
    ranks = two.run(step_cases.ending_in_fp16, argv=argv)
    assert [rank["error"][0] for rank in ranks] == ["Diverged"] * 2 and all(rank["known"] for rank in ranks)
    metrics = ranks[0]["metrics"]
    assert metrics["status"] == "diverged" and "step 2 overflow fp16 at the smallest loss scale" in metrics["error"]
    assert not [name for name in ranks[0]["files"] if name.endswith(".safetensors")]
