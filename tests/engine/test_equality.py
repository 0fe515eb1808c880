"""In bf16 the stages agree too, on uneven rows, with accumulation and clipping. In fp32: test_equivalence.py."""

from __future__ import annotations

import itertools

import pytest

from tests.helpers.tiny import write_recipe

STRATEGIES = ("zero0", "zero1", "zero2", "zero3")
STEPS = 20


def histories(group, folder) -> dict[str, list[float]]:
    """Loss history by strategy, after asserting that each run was what it says it was."""
    recipe = write_recipe(
        folder,
        max_steps=STEPS,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        learning_rate=2.0e-3,
    )
    found = {}
    for strategy in STRATEGIES:
        named = ["--deepspeed", f"ds_configs/{strategy}.json"]
        result = group.run("train", argv=[str(recipe), "--output_dir", str(folder / strategy), *named])[0]
        metrics = result["metrics"]
        stage = int(strategy[-1])
        assert (result["engine"], result["stage"], result["world_size"]) == ("DeepSpeedEngine", stage, group.world_size)
        assert (metrics["strategy"], metrics["zero_stage"], metrics["precision"]) == (strategy, stage, "bf16")
        losses = metrics["loss_history"]
        assert len(losses) == STEPS
        norms = metrics["grad_norm_history"]
        assert len(norms) == STEPS and max(norms) > 1.0, "clipping at 1.0 was not put to the test"
        assert losses[-1] < losses[0] - 1.0, f"{strategy} did not learn: {losses[0]:.3f} to {losses[-1]:.3f}"
        tokens = metrics["tokens"]
        assert tokens["supervised"] < tokens["non_padding"] < tokens["all"], "the rows are not uneven"
        found[strategy] = losses
    return found


def largest_gap(histories: dict[str, list[float]]) -> float:
    """The largest relative difference of two strategies' losses at one step."""
    return max(
        abs(a - b) / abs(a)
        for one, other in itertools.combinations(histories.values(), 2)
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture(scope="module")
def bf16(two, tmp_path_factory):
    return histories(two, tmp_path_factory.mktemp("bf16"))


def test_bf16_losses_of_the_sharding_stages_agree(bf16):
    assert largest_gap({name: bf16[name] for name in ("zero1", "zero2", "zero3")}) < 1e-3


def test_bf16_stage_0_agrees_too(bf16):
    """DeepSpeed takes an Adam step with zero gradients before training; FreshAdamAtStage0 undoes it."""
    assert largest_gap(bf16) < 1e-3


@pytest.mark.private
def test_the_patch_of_stage_0_is_still_needed(two, tmp_path, bf16):
    """Fails when DeepSpeed no longer steps before training: then remove FreshAdamAtStage0."""
    recipe = write_recipe(
        tmp_path, max_steps=STEPS, gradient_accumulation_steps=2, learning_rate=2.0e-3, weight_decay=0.1
    )
    argv = [str(recipe), "--output_dir", str(tmp_path / "out"), "--deepspeed", "ds_configs/zero0.json"]
    unmended = two.run("train_without_fresh_adam", argv=argv)[0]
    assert unmended["adam_steps_before_training"] == 1
    assert unmended["masters_moved"], "weight decay of the step before training shrinks the fp32 masters"
    assert largest_gap({"unmended": unmended["loss_history"], "zero1": bf16["zero1"]}) > 1e-3


def test_a_resumed_run_keeps_its_adam(two):
    """The mending must not touch a run whose checkpoint has been loaded already."""
    left = two.run("fresh_adam_on_resume")[0]
    assert left == {
        "fresh": {"steps": 0.0, "masters_are_the_weights": True},
        "resumed": {"steps": 7.0, "masters_are_the_weights": False},
    }


@pytest.mark.private
def test_generation_at_stage_3_needs_its_trace_forgotten(two, tmp_path):
    """Fails when DeepSpeed and TRL's fused LM head no longer collide: then remove forget_trace_of_generation."""
    recipe = write_recipe(tmp_path, eval_strategy="steps", eval_steps=100, sample_prompts=4, sample_max_new_tokens=4)
    argv = [str(recipe), "--output_dir", str(tmp_path / "out"), "--deepspeed", "ds_configs/zero3.json"]
    for said in two.run("train_without_forgetting", argv=argv):
        assert "in flight" in said
