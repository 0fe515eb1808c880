"""Known faults of the libraries: gone in the tested versions, or kept away from a run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    JambaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from tests.helpers.grid import grid
from tests.helpers.resuming import LORA as RESUMED
from tests.helpers.resuming import NOTHING, compare
from tests.helpers.tiny import llama_config, named, write_recipe
from zero_recipes.theory.deepspeed_memory import read_at_resume

ADAPTER = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": ["q_proj", "v_proj"]}
LORA = {"bf16": False, "max_steps": 3, "global_batch_size": 8, "learning_rate": 1e-2, "activation_checkpointing": True}
LORA |= ADAPTER | {"save_model": True}


def recipe_of(folder: Path, config, **keys) -> Path:
    recipe = write_recipe(folder, random_weights=False, **keys)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(recipe.parent / "model")
    return recipe


@pytest.fixture(scope="module")
def llamas(tmp_path_factory) -> dict[bool, Path]:
    """{tied: a recipe with LoRA on a Llama}."""
    folder = tmp_path_factory.mktemp("llamas")
    return {
        tied: recipe_of(folder / str(tied), llama_config(tie_word_embeddings=tied), **LORA) for tied in (True, False)
    }


# deepspeedai/DeepSpeed#8224, reported of 0.19.3: wrong gradients at stage 2 where a module is used several times


def shared_layers(count: int, seed: int) -> list[dict]:
    """Setups of fault_cases.shared_layer_gaps, drawn."""
    draw = random.Random(seed)
    return [
        {
            "stage": draw.choice([1, 2, 2, 3]),
            "dtype": draw.choice(["bfloat16", "bfloat16", "float32"]),
            "width": draw.randint(3, 70),
            "calls": [0, *(draw.randint(0, 2) for _ in range(draw.randint(1, 5))), 0],
            "recompute": draw.choice(["no", "nonreentrant"]),
            "forwards": draw.randint(1, 3),
            "accumulation": draw.randint(1, 3),
            "seed": draw.randint(0, 10**6),
            "zero": draw.choice(
                [{}, {"reduce_bucket_size": 100}, {"overlap_comm": True}, {"contiguous_gradients": False}]
            ),
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    "setups",
    [shared_layers(16, 1), pytest.param(shared_layers(300, 2), marks=pytest.mark.grid)],
    ids=["some", "many"],
)
def test_a_module_that_is_used_several_times_has_the_gradient_of_a_plain_model(two, setups):
    for gaps in two.run("fault_cases.shared_layer_gaps", setups=setups):
        wrong = [(setup, gap) for setup, gap in zip(setups, gaps, strict=True) if not gap < 0.02]
        assert not wrong


# huggingface/transformers#47254: LoRA, stage 3 and recomputed activations


def test_lora_with_checkpointing_has_the_losses_of_stage_2_at_stage_3(two, llamas, tmp_path):
    argv = [str(llamas[False]), "--output_dir"]
    wanted = two.run("train", argv=[*argv, str(tmp_path / "zero2"), *named("zero2")])[0]["metrics"]["loss_history"]
    asked_for = ["--gradient_checkpointing_kwargs", '{"use_reentrant": false}']
    for more in ([], asked_for):
        out = tmp_path / f"zero3-{len(more)}"
        found = two.run("train", argv=[*argv, str(out), *named("zero3"), *more])[0]["metrics"]["loss_history"]
        assert found == pytest.approx(wanted, rel=1e-6) and found[0] != found[-1]


def test_deepspeed_itself_recomputes_frozen_parameters(two, llamas, tmp_path):
    """From 0.19.4 on (DeepSpeed#8148). TRL 1.16 still recomputes by re-entrance: its own guard is no longer needed."""
    argv = [str(llamas[False]), "--output_dir", str(tmp_path / "out"), *named("zero3")]
    found = two.run("fault_cases.train_recomputing_without_reentrance", argv=argv)[0]
    assert found["reentrant"] is True
    argv = [str(llamas[False]), "--output_dir", str(tmp_path / "zero2"), *named("zero2")]
    wanted = two.run("train", argv=argv)[0]["metrics"]["loss_history"]
    assert found["loss_history"] == pytest.approx(wanted, rel=1e-6)


# huggingface/peft#2884, deepspeedai/DeepSpeed#7669: modules_to_save at stage 3


@pytest.mark.parametrize(
    ("modules", "tied"),
    [
        (["lm_head"], False),
        (["embed_tokens", "lm_head"], True),
        grid(["lm_head"], True),
        grid(["embed_tokens", "lm_head"], False),
    ],
    ids=lambda value: str(value) if isinstance(value, bool) else "+".join(value),
)
def test_modules_to_save_train_and_load_alike_at_stage_3(two, llamas, tmp_path, modules, tied):
    found = {}
    for strategy in ("zero2", "zero3"):
        argv = [str(llamas[tied]), "--output_dir", str(tmp_path / strategy), *named(strategy)]
        argv += ["--lora_modules_to_save", *modules]
        found[strategy] = two.run("fault_cases.train_and_look_at_the_head", argv=argv)[0]
    assert found["zero3"]["loss_history"] == pytest.approx(found["zero2"]["loss_history"], rel=1e-6)
    assert len(found["zero3"]["held"]) == len(modules)
    for whole, here in found["zero3"]["held"].values():
        assert here == -(-whole // 2), "they are partitioned like all others"
    files = [load_file(tmp_path / strategy / "adapter_model.safetensors") for strategy in ("zero2", "zero3")]
    assert set(files[0]) == set(files[1]) and sum("lora" not in name for name in files[0]) == len(modules)
    base = load_file(llamas[tied].parent / "model" / "model.safetensors")
    for name, tensor in files[0].items():
        assert torch.allclose(tensor, files[1][name], rtol=1e-3, atol=1e-5), name
        if "lora" not in name:
            assert not torch.equal(tensor, base.get(name.removeprefix("base_model.model."), tensor.new_zeros(1)))


def test_a_saved_head_is_what_peft_loads(two, llamas, tmp_path):
    from peft import PeftModel

    argv = [str(llamas[False]), "--output_dir", str(tmp_path / "out"), *named("zero3")]
    two.run("train", argv=[*argv, "--lora_modules_to_save", "lm_head"])
    base = LlamaForCausalLM.from_pretrained(llamas[False].parent / "model")
    loaded = PeftModel.from_pretrained(base, tmp_path / "out").state_dict()
    for name, tensor in load_file(tmp_path / "out" / "adapter_model.safetensors").items():
        inside = name.replace("lm_head.weight", "lm_head.modules_to_save.default.weight")
        inside = inside.replace("lora_A.weight", "lora_A.default.weight").replace(
            "lora_B.weight", "lora_B.default.weight"
        )
        assert torch.equal(loaded[inside], tensor), name


@pytest.mark.parametrize("bf16", [True, grid(False)])
def test_modules_to_save_resume_bit_for_bit_at_stage_3(two, tmp_path, bf16):
    assert compare(two, tmp_path, "zero3", bf16=bf16, lora_modules_to_save=["embed_in"], **RESUMED) == NOTHING


# linkedin/Liger-Kernel#1048: its fused loss reads a partitioned LM head


def test_ligers_kernels_leave_the_loss_to_trl_at_stage_3(two, llamas, tmp_path):
    argv = [str(llamas[False]), "--output_dir", str(tmp_path / "out"), *named("zero3"), "--use_peft", "false"]
    plain = two.run("train", argv=argv)[0]["metrics"]["loss_history"]
    argv[2] = str(tmp_path / "liger")
    found = two.run("fault_cases.train_with_liger", argv=[*argv, "--use_liger_kernel", "true"])[0]
    assert found["asked"] == [{"fused_linear_cross_entropy": False}]
    assert found["loss_history"] == plain


# DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py: releases of the trace of generation


def test_samples_before_training_make_no_step_gather_twice(two, tmp_path):
    """Fails without the patch no more when DeepSpeed has fixed it: forget_releases_with_the_trace may go."""
    recipe = write_recipe(tmp_path, max_steps=10)
    argv = [str(recipe), *named("zero3"), "--overwrite", "true", "--output_dir", str(tmp_path / "out")]
    asked = [*argv, "--sample_prompts", "3", "--sample_max_new_tokens", "6"]
    plain = two.run("fault_cases.sent_a_step", argv=argv, patched=True)[0]
    faulty = two.run("fault_cases.sent_a_step", argv=asked, patched=False)[0]
    assert two.run("fault_cases.sent_a_step", argv=asked, patched=True)[0] == plain
    assert faulty["all_gather"] > 1.5 * plain["all_gather"] and faulty["reduce_scatter"] == plain["reduce_scatter"]


# deepspeedai/DeepSpeed#7533: the other ranks' time is over while one saves


def test_deepspeeds_own_groups_have_the_time_of_the_run(two, tmp_path):
    recipe = write_recipe(tmp_path, max_steps=1)
    argv = [str(recipe), "--output_dir", str(tmp_path / "out"), "--ddp_timeout", "4321", *named("zero2")]
    assert set(two.run("fault_cases.timeouts", argv=argv, patched=True)[1]) == {4321}


def test_without_the_patch_they_have_torchs(two, tmp_path):
    """Fails when DeepSpeed hands its timeout on: then patches.patch_timeouts may go."""
    recipe = write_recipe(tmp_path, max_steps=1)
    argv = [str(recipe), "--output_dir", str(tmp_path / "out"), "--ddp_timeout", "4321", *named("zero2")]
    assert 4321 not in two.run("fault_cases.timeouts", argv=argv, patched=False)[1]


@pytest.mark.parametrize("strategy", [grid("ddp"), "zero3"])
def test_a_model_that_takes_longer_to_write_than_a_collective_may_is_saved(two, tmp_path, strategy):
    recipe = write_recipe(tmp_path, max_steps=1, save_model=True)
    argv = [str(recipe), "--output_dir", str(tmp_path / "out"), *named(strategy)]
    assert two.run("fault_cases.train_with_a_slow_writer", argv=argv) == ["saved", "saved"]
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_others_hear_of_a_writer_that_fails(two, tmp_path):
    recipe = write_recipe(tmp_path, max_steps=1, save_model=True)
    argv = [str(recipe), "--output_dir", str(tmp_path / "out"), *named("zero2")]
    writer, other = two.run("fault_cases.train_with_a_writer_that_fails", argv=argv)
    assert writer == "OSError: no room"
    assert other == "RuntimeError: rank 0 failed while it was saving: OSError: no room"


# modelscope/ms-swift#5875: a mixture of experts hangs where a rank uses no token of one

SIZES = {
    "vocab_size": 1031, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1, "max_position_embeddings": 256, "num_experts_per_tok": 1,
}  # fmt: skip
EXPERTS = 64  # more than a micro batch has tokens: on each rank some have none
MIXTURES = {
    "mixtral": MixtralConfig(**SIZES, intermediate_size=96, num_local_experts=EXPERTS),
    "qwen2": Qwen2MoeConfig(
        **SIZES, moe_intermediate_size=48, shared_expert_intermediate_size=32, num_experts=EXPERTS
    ),
    "qwen3": Qwen3MoeConfig(**SIZES, head_dim=16, moe_intermediate_size=48, num_experts=EXPERTS),
    "olmoe": OlmoeConfig(**SIZES, intermediate_size=48, num_experts=EXPERTS),
    "jamba": JambaConfig(
        **SIZES, intermediate_size=48, num_experts=EXPERTS, expert_layer_period=1, expert_layer_offset=0,
        attn_layer_period=1, attn_layer_offset=0, use_mamba_kernels=False, mamba_d_state=4,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", [name if name == "mixtral" else pytest.param(name, marks=pytest.mark.grid) for name in MIXTURES]
)
def test_experts_without_a_token_do_not_stop_stage_3(two, tmp_path, kind):
    """transformers 5 holds all experts of a layer in one tensor, which every rank gathers."""
    keys = {"bf16": False, "max_steps": 2, "per_device_train_batch_size": 1, "max_length": 48}
    recipe = recipe_of(tmp_path, MIXTURES[kind], **keys)
    histories = []
    for number, how in enumerate((named("ddp"), named("zero3"))):
        argv = [str(recipe), "--output_dir", str(tmp_path / str(number)), *how]
        histories.append(two.run("train", argv=argv)[0]["metrics"]["loss_history"])
    assert histories[1] == pytest.approx(histories[0], rel=1e-5) and histories[0][0] != histories[0][1]


# huggingface/transformers#47514: host memory while a mixture of experts loads at stage 3


def test_a_mixture_of_experts_loads_a_group_of_tensors_at_a_time(one, tmp_path):
    config = MixtralConfig(
        **(SIZES | {"hidden_size": 256, "num_hidden_layers": 12}), intermediate_size=512, num_local_experts=8
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    whole = sum(p.numel() * 4 for p in model.parameters())
    largest = max(p.numel() * 4 for p in model.parameters())
    zero3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    (found,) = one.run("fault_cases.host_memory_of_loading", folder=str(tmp_path), ds_config=zero3)
    assert found["held"] == whole  # one process: the profiler does not hear what gloo's threads free
    assert found["rise"] - whole < 4 * largest < 0.25 * whole, (found, whole, largest)


# deepspeedai/DeepSpeed#3938: what a resume reads


@pytest.mark.parametrize("strategy", [grid("zero2"), "zero3"])
def test_a_resume_reads_what_the_plan_says(two, tmp_path, strategy):
    recipe = write_recipe(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    argv = [str(recipe), "--output_dir", str(tmp_path / "out"), *named(strategy)]
    parameters = two.run("train", argv=argv)[0]["metrics"]["parameters"]
    wanted = read_at_resume(2 * parameters, 12 * parameters, int(strategy[-1]), 2)
    sizes = [path.stat().st_size for path in (tmp_path / "out" / "checkpoint-2").glob("global_step*/*_states.pt")]
    assert wanted == pytest.approx(max(sizes), rel=0.05)
    argv += ["--resume_from_checkpoint", "true", "--max_steps", "3"]
    for rise in two.run("fault_cases.bytes_read_at_resume", argv=argv):
        assert rise == pytest.approx(wanted, rel=0.05)
