"""Experts that one parameter holds: what LoRA and 4 bits reach of them, and what is said where they do not."""

import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.faults import FOUR, findings_in, run_of
from tests.helpers.mixtures import MODELS, ROUTED, SIZES
from tests.helpers.seeded import grid
from tests.helpers.tiny import settings_with, write_recipe
from tests.helpers.tools import refusal_of
from zero_recipes.checks.adapter_targets import unused_targets
from zero_recipes.checks.trl_objects import trainer_findings
from zero_recipes.model.experts import fused_experts
from zero_recipes.tools.plan.shape import shape_of

ALL_LINEAR = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear", "dtype": "bfloat16"}


def found_of(tmp_path, name: str, keys: dict) -> dict:
    """{code: finding} of a recipe with one of MODELS, as `check` finds them."""
    path = write_recipe(tmp_path)
    MODELS[name].save_pretrained(tmp_path / "model")
    found = [*trainer_findings(run_of(path, keys)), *findings_in(path, keys)]
    return {finding.code: finding for finding in found if finding.code != "ZR442"}  # of kernels for GPUs


def named_in(fix: str, key: str) -> list[str]:
    """The list that a fix gives a key, as a reader would paste it."""
    return re.search(rf"{key}: \[([^]]*)\]", fix)[1].split(", ")


@pytest.mark.parametrize("name", ["qwen3_moe", grid("glm4_moe_lite"), grid("mixtral")])
def test_dropout_on_experts_is_refused_by_its_own_name(tmp_path, name):
    """TRL's own value is 0.05. PEFT includes the experts in all-linear for these families."""
    found = found_of(tmp_path, name, ALL_LINEAR)
    assert "ZR199" not in found
    assert "experts.gate_up_proj" in found["ZR455"].what and found["ZR455"].fix == "Set lora_dropout: 0."
    assert {"ZR455", "ZR199"}.isdisjoint(found_of(tmp_path, name, ALL_LINEAR | {"lora_dropout": 0.0}))
    attention = ALL_LINEAR | {"lora_target_modules": ["o_proj"], "lora_dropout": 0.05}
    assert found_of(tmp_path, name, attention) == {}
    assert refusal_of(shape_of, MODELS[name].to_dict(), settings_with(**ALL_LINEAR)).codes == ["ZR455"], "in a plan"


def test_dropout_is_refused_where_it_stands(tmp_path):
    experts = {"lora_target_modules": ["q_proj"], "lora_target_parameters": ["experts.down_proj"], "lora_dropout": 0.0}
    keys = ALL_LINEAR | experts | {"peft_config": {"lora_dropout": 0.1}}
    assert found_of(tmp_path, "qwen3_5_moe_text", keys)["ZR455"].key == "peft_config.lora_dropout"
    assert found_of(tmp_path, "qwen3_5_moe_text", ALL_LINEAR | experts) == {}


def test_another_error_of_trl_stays_the_librarys(tmp_path):
    found = found_of(tmp_path, "llama", ALL_LINEAR | {"router_aux_loss_coef": 0.1})
    assert "ZR199" in found and {"ZR455", "ZR456"}.isdisjoint(found)


def test_modules_that_peft_refuses_are_left_out_of_the_list_to_paste(tmp_path):
    refused = found_of(tmp_path, "nemotron_h", ALL_LINEAR)
    assert "ZR199" not in refused and "out_proj" in refused["ZR456"].what
    names = named_in(refused["ZR456"].fix, "lora_target_modules")
    assert names == ["in_proj", "up_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj"]
    found = found_of(tmp_path, "nemotron_h", ALL_LINEAR | {"lora_target_modules": names})
    assert [*found] == ["ZR457"], "the shared expert's layers have the names of the experts' parameters"
    parameters = {"lora_target_parameters": named_in(found["ZR457"].fix, "lora_target_parameters")}
    with_experts = ALL_LINEAR | parameters | {"lora_dropout": 0.0}
    assert found_of(tmp_path, "nemotron_h", with_experts | {"lora_target_modules": names}) == {}
    assert [*found_of(tmp_path, "nemotron_h", ALL_LINEAR | parameters)] == ["ZR456", "ZR455"]


def test_experts_that_all_linear_does_not_reach_are_named(tmp_path):
    """With as many more parameters as the adapter then really has."""
    found = found_of(tmp_path, "qwen3_5_moe_text", ALL_LINEAR)
    assert [*found] == ["ZR457"] and found["ZR457"].level == "warning"
    names = named_in(found["ZR457"].fix, "lora_target_parameters")
    assert names == ["experts.gate_up_proj", "experts.down_proj"]
    sizes = []
    for parameters in (None, names):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(MODELS["qwen3_5_moe_text"])
        config = LoraConfig(r=4, target_modules="all-linear", target_parameters=parameters)
        sizes.append(get_peft_model(model, config).get_nb_trainable_parameters()[0])
    assert f"{sizes[1] - sizes[0]:,} more" in found["ZR457"].fix
    own = {"lora_target_parameters": names, "lora_dropout": 0.0}
    for keys in (own, {"lora_target_modules": ["q_proj", "v_proj"]}):
        assert found_of(tmp_path, "qwen3_5_moe_text", ALL_LINEAR | keys) == {}
    assert found_of(tmp_path, "llama", ALL_LINEAR) == {}


def test_layers_whose_names_peft_takes_for_the_experts(tmp_path):
    """Shared experts and the dense first layer. Fails when PEFT reaches them (huggingface/peft#3711)."""
    keys = ALL_LINEAR | {"lora_dropout": 0.0}
    (found,) = found_of(tmp_path, "glm4_moe_lite", keys).values()
    assert found.code == "ZR458" and found.level == "warning"
    assert "6 linear layers" in found.what and "shared_experts.down_proj" in found.what
    assert found_of(tmp_path, "qwen3_moe", keys) == {}
    names = ["q_a_proj", "q_b_proj", "gate_proj", "up_proj", "down_proj"]
    assert [*found_of(tmp_path, "glm4_moe_lite", keys | {"lora_target_modules": names})] == ["ZR458"]


def test_an_adapter_that_no_call_reaches(tmp_path):
    found = found_of(tmp_path, "bamba", ALL_LINEAR)
    assert [*found] == ["ZR482"] and "BambaMixer" in found["ZR482"].what
    names = named_in(found["ZR482"].fix, "lora_target_modules")
    assert "in_proj" in names and "out_proj" not in names
    assert found_of(tmp_path, "bamba", ALL_LINEAR | {"lora_target_modules": names}) == {}


def test_a_layer_that_is_not_called_gives_its_adapter_no_gradient():
    """Mamba multiplies with `dt_proj.weight` on every device."""
    config = AutoConfig.for_model("mamba", vocab_size=31, hidden_size=16, num_hidden_layers=1, state_size=4)
    model = AutoModelForCausalLM.from_config(config)
    layers = {"dt_proj": "backbone.layers.0.mixer.dt_proj", "in_proj": "backbone.layers.0.mixer.in_proj"}
    assert unused_targets(model, layers.values()) == [layers["dt_proj"]]
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=[*layers]))
    adapted(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    got = {name: p.grad is not None for name, p in adapted.named_parameters() if "lora_B" in name}
    assert [got[name] for name in sorted(got)] == [False, True]


@pytest.mark.parametrize("name", MODELS)
def test_fused_experts_are_told_by_the_modules(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MODELS[name])
    shapes = {tuple(weight.shape) for weight in fused_experts(model).values()}
    expected = {(4, 32, 32), (4, 32, 16)}
    own = {"llama": set(), "bamba": set(), "mixtral": {(4, 96, 32), (4, 32, 48)}}
    own["nemotron_h"] = {(4, 16, 32), (4, 32, 16)}  # without a gate; its convolutions have three dimensions, too
    assert shapes == own.get(name, expected)


def test_four_bits_leave_the_experts_as_they_are(tmp_path):
    """What `plan` counts as packed is what bitsandbytes replaces: linear layers, and no expert."""
    config = MODELS["mixtral"].to_dict()
    shape = shape_of(config, settings_with(use_peft=False))
    attention = 2 * 32 * 32 + 2 * 32 * 16
    assert shape.packed == 2 * attention
    keys = FOUR | {"random_weights": False, "lora_target_modules": ["q_proj"], "dtype": "bfloat16"}
    found = found_of(tmp_path, "mixtral", keys)
    experts = 2 * 4 * (96 * 32 + 32 * 48)
    assert found["ZR481"].level == "error" and f"{2 * experts / 1e6:.2f} MB" in found["ZR481"].what
    assert "ZR474" not in found
    shared = AutoConfig.for_model(
        "qwen3_moe", **SIZES, **ROUTED | {"moe_intermediate_size": 2}, head_dim=8, num_experts=2
    )
    shared.save_pretrained(tmp_path / "model")
    codes = {finding.code: finding.level for finding in findings_in(tmp_path / "recipe.yaml", keys)}
    assert codes["ZR481"] == "warning", "most of this model is packed"
