"""Parameters that a model's class keeps in fp32 (a router's weight, a frozen bias near 8) stay so in 16-bit runs."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig

from tests.helpers import cases, family_cases
from tests.helpers.faults import ds_config
from tests.helpers.seeded import grid
from tests.helpers.tiny import arguments, write_recipe
from zero_recipes.engine.faults.unfrozen_parameters import freeze_as_the_class_does
from zero_recipes.model.build import build_on_meta
from zero_recipes.tools.reshard import reshard

KEPT = ("mlp.gate.weight", "mlp.moe_statics.e_score_correction_bias")
SIZES = {"vocab_size": 1031, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
SIZES |= {"moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1, "moe_layer_start_index": 0}
SIZES |= {"moe_layer_end_index": 1, "moe_layer_interval": 1, "tie_word_embeddings": False}
SIZES |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
LORA = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": ["q_proj"]}
KEYS = {"random_weights": False, "dtype": "bfloat16", "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
KEYS |= {"save_model": True, "max_steps": 2, "warmup_steps": 0}


def is_kept(name: str) -> bool:
    return name.endswith(KEPT)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """An ERNIE-4.5-MoE whose other weights bf16 holds exactly. The bias of its routers decides which experts run."""
    folder = tmp_path_factory.mktemp("fp32")
    path = write_recipe(folder, **KEYS)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Ernie4_5_MoeConfig(**SIZES), dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.copy_(8 + 0.1 * torch.randn_like(p))
            elif not is_kept(name):
                p.copy_(p.bfloat16())
    model.save_pretrained(folder / "model")
    return path


def run(two, recipe: Path, strategy: str, out: Path, *words: str) -> dict:
    return two.run(cases.train, argv=arguments(recipe, strategy, out, *words))[0]["metrics"]


@pytest.fixture(scope="module")
def expected(two, recipe, tmp_path_factory) -> list[float]:
    """Losses without DeepSpeed, in bf16, at a learning rate of 0."""
    return run(two, recipe, "ddp", tmp_path_factory.mktemp("ddp"), "--learning_rate", "0")["loss_history"]


@pytest.mark.parametrize(
    "strategy",
    ["zero0", "zero1", "zero2", "zero3", grid("zero2_offload"), "zero3_offload", grid("zero3_hpz"), grid("fsdp2")],
)
def test_what_is_not_trained_is_saved_as_it_was_loaded(two, recipe, expected, tmp_path, strategy):
    losses = run(two, recipe, strategy, tmp_path, "--learning_rate", "0")["loss_history"]
    loaded, saved = load_file(recipe.parent / "model" / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert saved.keys() == loaded.keys() and sum(map(is_kept, saved)) == 4
    for name, tensor in saved.items():
        assert torch.equal(tensor.float(), loaded[name]), name
        assert tensor.dtype == torch.float32 or not is_kept(name)
    if strategy != "fsdp2":
        assert losses == pytest.approx(expected, abs=2e-4)


@pytest.mark.grid
def test_gradients_accumulated_in_fp32_at_stage_1_leave_the_others_in_16_bits(two, recipe, expected, tmp_path):
    """By DeepSpeed's BF16_Optimizer, which flattens a group of two dtypes in fp32."""
    config = ds_config(1) | {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(json.loads(recipe.read_text()) | {"deepspeed": config, "learning_rate": 0.0}))
    found = two.run(cases.train, argv=[str(path), "--output_dir", str(tmp_path / "out")])[0]
    assert found["optimizer"] == "BF16_Optimizer"
    assert found["metrics"]["loss_history"] == pytest.approx(expected, abs=2e-5)
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert tensor.dtype == (torch.float32 if is_kept(name) else torch.bfloat16)


def kept_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if is_kept(name)}


@pytest.mark.parametrize("strategy", ["zero2", "zero3", grid("zero2_offload"), grid("zero3_offload")])
def test_they_train_in_fp32_and_a_resumed_run_goes_on_with_their_bits(two, recipe, tmp_path, strategy):
    """Of DDP's losses. A router trains, its frozen bias does not.

    With offload to the last bits but a few: DeepSpeedCPUAdam multiplies the powers of its betas from step to step, and
    computes them anew in a resumed run (0.19.8, csrc/includes/cpu_adam.h).
    """
    words = ["--learning_rate", "1e-3", "--max_steps", "4", "--save_strategy", "steps", "--save_steps", "2"]
    whole = run(two, recipe, strategy, tmp_path / "whole", *words)
    ddp = run(two, recipe, "ddp", tmp_path / "ddp", *words, "--save_model", "false", "--save_strategy", "no")
    assert whole["loss_history"] == pytest.approx(ddp["loss_history"], abs=1e-3)
    before, after = kept_in(recipe.parent / "model"), kept_in(tmp_path / "whole")
    for name, tensor in after.items():
        assert tensor.dtype == torch.float32 and not torch.equal(tensor, tensor.bfloat16().float())
        assert torch.equal(tensor, before[name]) == name.endswith("bias")
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    resumed = run(two, recipe, strategy, tmp_path / "resumed", *words, "--resume_from_checkpoint", "true")
    offloads = strategy.endswith("offload")
    assert resumed["loss_history"] == pytest.approx(whole["loss_history"], abs=1e-5 if offloads else 0, rel=0)
    for name, tensor in kept_in(tmp_path / "resumed").items():
        assert torch.allclose(tensor, after[name], rtol=0, atol=1e-5 if offloads else 0)


@pytest.mark.grid
def test_a_reshard_keeps_them(one, two, recipe, tmp_path):
    words = ["--learning_rate", "1e-3", "--max_steps", "4", "--save_strategy", "steps", "--save_steps", "2"]
    whole = run(two, recipe, "zero2", tmp_path, *words)
    shutil.rmtree(tmp_path / "checkpoint-4")
    target, batch = reshard(tmp_path / "checkpoint-2", 1, 3)
    words += ["--resume_from_checkpoint", str(target), "--gradient_accumulation_steps", str(batch.accumulation)]
    resumed = run(one, recipe, "zero3", tmp_path, *words)
    assert resumed["loss_history"] == pytest.approx(whole["loss_history"], abs=1e-3)
    assert {tensor.dtype for tensor in kept_in(tmp_path).values()} == {torch.float32}


@pytest.mark.parametrize("strategy", [grid("zero2"), "zero3"])
def test_those_of_a_frozen_base_are_kept_too(two, recipe, expected, tmp_path, strategy):
    """The first loss of an adapter is its base's."""
    path = tmp_path / "lora.yaml"
    path.write_text(json.dumps(json.loads(recipe.read_text()) | LORA))
    losses = run(two, path, strategy, tmp_path / "out", "--learning_rate", "0")["loss_history"]
    assert losses == pytest.approx(expected, abs=2e-4)


@pytest.mark.private
@pytest.mark.parametrize("strategy", ["zero0", "zero2", "zero3"])
def test_deepspeed_alone_would_round_them(two, recipe, tmp_path, strategy):
    """Fails when DeepSpeed keeps parameters: then remove engine/faults/fp32_parameters.py."""
    argv = arguments(recipe, strategy, tmp_path, "--learning_rate", "0")
    two.run(family_cases.train_as_deepspeed_casts, argv=argv)
    before = kept_in(recipe.parent / "model")
    assert not any(torch.equal(tensor.float(), before[name]) for name, tensor in kept_in(tmp_path).items())


def test_what_the_class_freezes_is_frozen_after_loading_too(recipe):
    model = AutoModelForCausalLM.from_pretrained(recipe.parent / "model", dtype=torch.bfloat16)
    freeze_as_the_class_does(model, build_on_meta(model.config))
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert len(frozen) == 2 and all(name.endswith("e_score_correction_bias") for name in frozen)
