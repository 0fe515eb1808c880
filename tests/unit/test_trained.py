"""What a run says that trains, and the names that PEFT makes something else of."""

import pytest
import torch
from peft import LoraConfig, OFTConfig, get_peft_model
from transformers import AutoModelForCausalLM, MixtralConfig

from tests.helpers.faults import findings_in, run_of
from tests.helpers.tiny import llama_config, write_recipe
from zero_recipes.checks.adapter_rules import trained_without_memory
from zero_recipes.model.trained import trained_parts

SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2}
Q = 2 * 16 * 4  # elements of two matrices of rank 4 on a q_proj of the small model


def small(kind=llama_config, **keys) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(kind(**(SMALL | keys)))


def test_full_fine_tuning_trains_all_or_names_what_is_frozen():
    model = small()
    total = sum(p.numel() for p in model.parameters())
    assert trained_parts(model) == f"all {total:,} parameters"
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.requires_grad_(False)
    assert trained_parts(model) == f"{total - 512:,} of {total:,} parameters, all but 2 q_proj.weight"


@pytest.mark.parametrize(
    ("config", "parts", "trained"),
    [
        (LoraConfig(r=4, target_modules=["q_proj"]), "LoRA on 2 q_proj", 2 * Q),
        (LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[1]), "LoRA on 1 q_proj", Q),
        (LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), "LoRA on 2 q_proj, 2 v_proj", 4 * Q),
        (
            LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "norm"]),
            "LoRA on 2 q_proj; whole 2 input_layernorm, 2 post_attention_layernorm, 1 norm, 1 lm_head",
            2 * Q + 5 * 16 + 1024,
        ),
        (
            LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[3, 5]),
            "2 tokens of 1 embed_tokens; LoRA on 2 q_proj",
            2 * Q + 2 * 16,
        ),
        (OFTConfig(oft_block_size=4, target_modules=["q_proj"]), "OFT on 2 q_proj", 2 * 4 * 6),
    ],
)
def test_an_adapter_is_told_by_modules_and_parameters(config, parts, trained):
    model = get_peft_model(small(), config)
    total = sum(p.numel() for p in model.parameters())
    assert trained_parts(model) == f"{parts}; {trained:,} of {total:,} parameters"


def test_the_parameters_of_experts_are_told_by_their_names():
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    text = trained_parts(get_peft_model(small(MixtralConfig, num_local_experts=2), config))
    for part in ("2 q_proj", "2 experts.gate_up_proj", "2 experts.down_proj"):
        assert part in text.partition(";")[0]


def test_what_check_says_is_what_the_model_without_memory_trains(tmp_path):
    path = write_recipe(tmp_path)
    lora = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["query_key_value"]}
    assert trained_without_memory(run_of(path, {})) == "all 192,074 parameters"
    text = "LoRA on 2 query_key_value; 2,048 of 194,122 parameters"
    assert trained_without_memory(run_of(path, lora)) == text
    assert trained_without_memory(run_of(path, lora | {"chat_template_path": str(tmp_path / "model")})) is None


def test_names_of_modules_that_have_become_parameters(tmp_path):
    """PEFT takes Mixtral's w1, w2 and w3 for experts.gate_up_proj and experts.down_proj."""
    path = write_recipe(tmp_path)
    MixtralConfig(**SMALL, num_local_experts=2).save_pretrained(tmp_path / "model")
    keys = {"use_peft": True, "lora_dropout": 0.0, "lora_r": 4}

    def names(*targets: str) -> list[str]:
        found = findings_in(path, keys | {"lora_target_modules": [*targets]})
        return [finding.what.rpartition(": ")[2] for finding in found if finding.code == "ZR446"]

    assert names("q_proj", "w1", "w2", "w3") == []
    assert names("q_proj", "w1", "w2", "w3", "w4") == ["w4"]


def test_many_names_that_peft_makes_fewer_of(tmp_path):
    """From 20 names on it looks for shorter ones that match the same."""
    path = write_recipe(tmp_path)
    layers = [f"gpt_neox.layers.{layer}" for layer in range(2)]
    kinds = ["attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"]
    targets = [f"{layer}.{kind}" for layer in layers for kind in kinds] + ["lm_head"]
    idle = [f"gpt_neox.layers.{layer}.attention.dense" for layer in range(2, 14)]
    keys = {"use_peft": True, "lora_target_modules": [*targets, *idle]}
    (found,) = [finding for finding in findings_in(path, keys) if finding.code == "ZR446"]
    assert found.what.count("attention.dense") == len(idle)


@pytest.mark.parametrize(
    ("pattern", "idle"),
    [
        (r".*\.(dense|query_key_value)", []),
        (r".*\.(?:dense|up)", ["up"]),
        (r"gpt_neox\.layers\.(0|1|2)\.(attention|mlp)\.(dense|dense_h_to_4h)", ["2"]),
        (r"(?!lm_head|embed).*dense", []),
        (r".*\.dense|.*\.up", [r".*\.up"]),
        (r".*\.(dense)", []),
        (r".*\.(dense|[)]x)", []),  # its group does not end at the first ")"
        (r"gpt_neox\.layers\.[01]\..*\.(dense|up)", ["up"]),
    ],
)
def test_each_alternative_of_a_pattern_matches_something(tmp_path, pattern, idle):
    found = findings_in(write_recipe(tmp_path), {"use_peft": True, "lora_target_modules": [pattern]})
    assert [finding.what.rpartition("have: ")[2] for finding in found if finding.code == "ZR446"] == idle
