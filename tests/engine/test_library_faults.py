"""Known faults of the libraries: gone in the tested versions, or kept away from a run."""

import pytest

from tests.engine.test_ds_configs import small_config
from tests.helpers import cases, fault_cases, step_cases
from tests.helpers.group import CaseFailed
from tests.helpers.seeded import grid
from tests.helpers.tiny import arguments, named, write_recipe
from zero_recipes.tools.verify import verify

# DeepSpeed 0.19.8, engine.py: at stage 0 in bf16 it takes an Adam step with zero gradients before training


def test_stage_0_begins_with_a_fresh_adam(two):
    """tests/engine/test_masters.py shows that a resumed run keeps its own."""
    left = two.run(step_cases.fresh_adam)[0]
    assert left["fresh"] == {"steps": 0.0, "masters_are_the_weights": True}


@pytest.mark.private
def test_the_patch_of_stage_0_is_still_needed(two):
    """Fails when DeepSpeed no longer steps before training: then remove fresh_adam_at_stage_0."""
    left = two.run(step_cases.fresh_adam)[0]
    assert left["unpatched"] == {"steps": 1.0, "masters_are_the_weights": False}


@pytest.mark.private
def test_generation_at_stage_3_needs_its_trace_forgotten(two, tmp_path):
    """Fails when DeepSpeed and TRL's fused LM head no longer collide: then remove forget_trace_of_generation."""
    recipe = write_recipe(tmp_path, eval_strategy="steps", eval_steps=100, sample_prompts=4, sample_max_new_tokens=4)
    argv = arguments(recipe, "zero3", tmp_path / "out")
    with pytest.raises(CaseFailed, match=r"in flight|size of tensor a \(0\)"):  # by what is prefetched when
        two.run(cases.train, argv=argv, left_out="zero_recipes.training.answers.forget_trace_of_generation")


# DeepSpeed 0.19.8, runtime/engine.py: weights that a model reads outside of their modules while it generates


def gemma_4(folder):
    """A recipe with an adapter on a small Gemma 4, whose model reads a row of the embedding."""
    adapter = {"use_peft": True, "lora_target_modules": [r".*language_model.*\.q_proj"]}
    recipe = write_recipe(folder, **adapter, sample_prompts=2, max_steps=1)
    small_config("google/gemma-4-E4B-it").save_pretrained(folder / "model")
    return [*arguments(recipe, "zero3", folder / "out"), "--sample_max_new_tokens", "2"]


@pytest.mark.grid
def test_gemma_4_answers_at_stage_3(two, tmp_path):
    assert two.run(cases.train, argv=gemma_4(tmp_path))[0]["metrics"]["status"] == "ok"
    assert (tmp_path / "out" / "samples.jsonl").read_text().count("\n") >= 2


@pytest.mark.private
def test_generation_of_gemma_4_at_stage_3_finds_no_embedding(two, tmp_path):
    """Fails when it does: then remove faults/weights_read_in_generation.py."""
    with pytest.raises(CaseFailed, match="too many indices"):
        two.run(cases.train, argv=gemma_4(tmp_path), left_out="zero_recipes.training.answers.gather_where_read")


# DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py: releases of the trace of generation


@pytest.mark.grid
def test_samples_before_training_make_no_step_gather_twice(two, tmp_path):
    """Fails without the patch no more when DeepSpeed has fixed it: faults/stale_releases.py may go."""
    recipe = write_recipe(tmp_path, max_steps=10)
    argv = [str(recipe), *named("zero3"), "--overwrite", "true", "--output_dir", str(tmp_path / "out")]
    asked = [*argv, "--sample_prompts", "3", "--sample_max_new_tokens", "6"]
    plain = two.run(step_cases.sent_a_step, argv=argv, patched=True)[0]
    faulty = two.run(step_cases.sent_a_step, argv=asked, patched=False)[0]
    found = two.run(step_cases.sent_a_step, argv=asked, patched=True)[0]
    assert {name: found[name] for name in plain} == plain, found  # beside it a flag where the order is recorded anew
    assert faulty["all_gather"] > 1.5 * plain["all_gather"] and faulty["reduce_scatter"] == plain["reduce_scatter"]


def test_a_step_after_generation_gathers_the_model_once(two):
    """Two steps record the order anew; the last steps go by it. Unpatched: by the order of generation."""
    for found in two.run(fault_cases.gathered_after_generation, is_patched=True):
        assert found[-2:] == [1, 1], found
    for found in two.run(fault_cases.gathered_after_generation, is_patched=False):
        assert found[-2:] == [2, 2], "faults/stale_releases.py may go"


# DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py: what speed/releases.py replaces


def test_a_weight_that_an_outer_module_still_uses_is_not_released(one):
    """By the module within, whose forward pass has ended."""
    plain, patched = (one.run(fault_cases.losses_of_shared_weight, is_patched=each)[0] for each in (False, True))
    assert patched == plain and len(set(plain)) == 4


# DeepSpeed 0.19.8, runtime/zero/stage3.py: the last rank's part is padded


def test_a_master_is_set_whole_where_the_ranks_do_not_divide_it(two):
    assert two.run(fault_cases.masters_of_uneven_parts) == [[1, 2, 3, 4, 5]] * 2


# TRL 1.16, kernels/chunked_logprob.py: its fused LM head in a model that is compiled as a whole, at stage 3


def compiled(tmp_path, *more: str) -> list[str]:
    """Of a run at stage 3. Its graphs are made as ever, but not handed to a C++ compiler."""
    of_one_shape = {"pad_to_multiple_of": 128, "max_length": 128}
    recipe = write_recipe(tmp_path, max_steps=2, bf16=False, save_model=True, **of_one_shape)
    return [*arguments(recipe, "zero3", tmp_path / "out"), "--torch_compile_backend", "aot_eager", *more]


@pytest.mark.grid
def test_stage_3_is_compiled_by_layers(one, tmp_path):
    argv = compiled(tmp_path)
    result = one.run(cases.train_and_count_graphs, argv=argv)[0]
    plain = one.run(cases.train, argv=[*argv[:-2], "--overwrite", "true"])[0]
    assert result["graphs"] > 1 and verify(tmp_path / "out.previous")
    for key in ("loss_history", "grad_norm_history"):
        assert result["metrics"][key] == pytest.approx(plain["metrics"][key], rel=1e-6)


@pytest.mark.private
def test_stage_3_cannot_be_compiled_as_a_whole(one, tmp_path):
    """Fails when TRL's fused head and DeepSpeed no longer collide: then remove compiled_at_stage_3."""
    argv = compiled(tmp_path)
    with pytest.raises(CaseFailed, match="modified by an inplace operation"):
        one.run(cases.train, argv=argv, left_out="zero_recipes.engine.faults.compiled_at_stage_3.apply")


# deepspeedai/DeepSpeed#7533: the other ranks' time is over while one saves


@pytest.mark.parametrize("strategy", [grid("ddp"), "zero3"])
def test_a_model_that_takes_longer_to_write_than_a_collective_may_is_saved(two, tmp_path, strategy):
    recipe = write_recipe(tmp_path, max_steps=1, save_model=True)
    argv = arguments(recipe, strategy, tmp_path / "out")
    two.run(step_cases.train_with_a_slow_writer, argv=argv)
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("patched", [True, pytest.param(False, marks=pytest.mark.private)])
def test_deepspeeds_own_groups_have_the_time_of_the_run(two, tmp_path, patched):
    """Unpatched it fails when DeepSpeed hands its timeout on: then faults/group_timeouts.py may go."""
    recipe = write_recipe(tmp_path, max_steps=1)
    argv = [str(recipe), "--output_dir", str(tmp_path / "out"), "--ddp_timeout", "4321", *named("zero2")]
    made = set(two.run(step_cases.timeouts, argv=argv, patched=patched)[1])
    assert made == {4321} if patched else 4321 not in made
