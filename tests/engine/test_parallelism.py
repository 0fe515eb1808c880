"""Mixtures of experts under the sharding strategies train as a plain run does."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig

from tests.helpers import cases
from tests.helpers.faults import ds_config
from tests.helpers.mixtures import MODELS
from tests.helpers.seeded import grid
from tests.helpers.tiny import arguments, named, weights_apart, write_experts, write_recipe
from zero_recipes.tools import main as cli
from zero_recipes.tools.verify import verify

KEYS = {"bf16": False, "max_steps": 4, "global_batch_size": 8, "save_model": True}


@pytest.fixture(scope="module")
def experts(two, tmp_path_factory):
    """A Mixtral with weights: (recipe, metrics and folder under ddp)."""
    recipe = write_recipe(tmp_path_factory.mktemp("experts"), random_weights=False, **KEYS)
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=1031, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, bos_token_id=0, eos_token_id=0,
        pad_token_id=1, max_position_embeddings=256,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(recipe.parent / "model")
    return recipe, *trained(two, recipe, recipe.parent / "ddp", "ddp")


def trained(two, recipe: Path, folder: Path, strategy: str) -> tuple[dict, Path]:
    metrics = two.run(cases.train, argv=arguments(recipe, strategy, folder))[0]["metrics"]
    assert verify(folder)["parameters"] == metrics["parameters"]
    return metrics, folder


@pytest.mark.parametrize("strategy", [grid("zero2"), "zero3", "fsdp2"])
def test_a_mixture_of_experts_trains_as_under_ddp(two, experts, tmp_path, strategy):
    recipe, wanted, folder = experts
    found, out = trained(two, recipe, tmp_path / "out", strategy)
    losses = wanted["loss_history"]
    assert found["loss_history"] == pytest.approx(losses, rel=1e-5) and losses[-1] < losses[0]
    assert found["model_flops_per_token"] == pytest.approx(wanted["model_flops_per_token"]), "by parts of weights"
    assert weights_apart(out, folder) < 1e-5


@pytest.mark.parametrize("implementation", ["eager", grid("batched_mm"), grid("grouped_mm")])
def test_stage_3_gathers_experts_for_every_implementation(two, experts, tmp_path, implementation):
    """transformers' choice is grouped_mm. Its own loop leaves out experts without tokens, which differ by rank."""
    recipe, wanted, _ = experts
    how = ["--model_init_kwargs", json.dumps({"experts_implementation": implementation}), "--save_model", "false"]
    found = two.run(cases.train, argv=arguments(recipe, "zero3", tmp_path / "out", *how))[0]["metrics"]
    assert found["loss_history"] == pytest.approx(wanted["loss_history"], rel=1e-5)


# what `check` gives a reader to write (tests/unit/test_experts.py): no dropout, or the names of its fixes
ADAPTERS = {
    "glm4_moe_lite": {"lora_target_modules": "all-linear"},
    "nemotron_h": {
        "lora_target_modules": ["in_proj", "up_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj"],
        "lora_target_parameters": ["experts.up_proj", "experts.down_proj"],
    },
}


@pytest.mark.parametrize(
    ("name", "strategies"),
    [
        ("glm4_moe_lite", ["ddp", "zero3"]),
        grid("glm4_moe_lite", ["ddp", "zero2", "zero3", "fsdp2"]),
        grid("nemotron_h", ["ddp", "zero2", "zero3", "fsdp2"]),
    ],
)
def test_lora_on_experts_is_the_same_under_every_strategy_and_reloads(two, tmp_path, name, strategies, capsys):
    lora = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0, "learning_rate": 1e-2, "warmup_steps": 0}
    keys = KEYS | lora | ADAPTERS[name] | {"activation_checkpointing": name == "glm4_moe_lite"}
    recipe = write_recipe(tmp_path, random_weights=False, **keys)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(MODELS[name])
    base.save_pretrained(recipe.parent / "model")
    losses = {}
    for strategy in strategies:
        out = tmp_path / strategy
        losses[strategy] = two.run(cases.train, argv=arguments(recipe, strategy, out))[0]["metrics"]["loss_history"]
        assert losses[strategy] == pytest.approx(losses["ddp"], rel=1e-6)
        saved = load_file(out / "adapter_model.safetensors")
        assert any(".experts.base_layer.lora_A" in key for key in saved), "both matrices of the experts"
        assert all(tensor.any() for tensor in saved.values()), "each of them has trained"
        loaded = get_peft_model_state_dict(PeftModel.from_pretrained(copy.deepcopy(base), out))
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    assert losses["ddp"][0] - losses["ddp"][-1] > 0.05, "it does not learn"
    assert cli.main(["export", str(tmp_path / "zero3")]) == 0
    printed = re.search(r"loss on 8 rows of .*: ([\d.]+) of the run's model, ([\d.]+) of", capsys.readouterr().out)
    assert printed[1] == printed[2], "merged into the experts"


@pytest.mark.private
def test_experts_of_their_own_need_leaf_modules(two, tmp_path):
    """Stage 2's gradients are wrong (ZR285): fails when DeepSpeed no longer mixes them up, then drop that refusal."""
    recipe = write_recipe(tmp_path, trust_remote_code=True, bf16=False)
    write_experts(tmp_path / "model")

    def losses(*how: str, case: Callable = cases.train) -> list[float]:
        argv = [str(recipe), "--output_dir", str(tmp_path / "out"), "--overwrite", "true", *how]
        return two.run(case, argv=argv)[0]["metrics"]["loss_history"]

    right, stage_2 = losses(*named("zero0")), losses(*named("zero2"), case=cases.train_unchecked)
    stage_3 = losses("--deepspeed", json.dumps(ds_config(3, leaf_module={"classes": ["OwnSparseMoeBlock"]})))
    by_layer = losses(*named("zero3"))
    assert stage_3 == by_layer == pytest.approx(right, rel=1e-5) and stage_2 != pytest.approx(right, rel=1e-4)
