"""Composite models: which of their parts text reaches, by the class; what follows for loading, adapters and FLOPs."""

import re

import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

from tests.helpers.composites import SIZES, composite_config, composite_model, write_composite
from tests.helpers.faults import run_of
from tests.helpers.tiny import llama_config, settings_with, write_recipe
from zero_recipes.checkpoint.saved_model import NotWhole, entries_of, refuse_bad_numbers
from zero_recipes.checks.adapter_rules import adapted_model, trained_without_memory
from zero_recipes.checks.composite_rules import composite_findings, refuses_text
from zero_recipes.engine.faults.fsdp_head_of_an_adapter import norm_of_decoder
from zero_recipes.engine.fsdp import has_final_norm
from zero_recipes.metrics.flops import model_flops
from zero_recipes.model.build import build_on_meta
from zero_recipes.model.towers import auto_class, excluding, is_within, spare_towers, tower_names
from zero_recipes.model.trained import trained_parts
from zero_recipes.tools.plan.shape import shape_of

LORA = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0}


def codes_of(findings) -> list[str]:
    return [found.code for found in findings]


@pytest.mark.parametrize("kind", SIZES)
def test_what_is_frozen_is_what_a_row_of_text_gives_no_gradient(kind):
    model = composite_model(kind)
    towers = tower_names(model)
    ids = torch.arange(2, 34).reshape(2, 16)
    model.train()(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.sum().backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert without and without == {name for name, _ in model.named_parameters() if is_within(name, towers)}


def test_a_model_of_text_alone_has_no_towers():
    model = build_on_meta(llama_config())
    assert tower_names(model) == [] and all(p.requires_grad for p in model.parameters())
    adapter = peft.LoraConfig(target_modules="all-linear")
    assert spare_towers(adapter, model) is adapter and spare_towers(None, model) is None


def test_a_composite_checkpoint_is_loaded_whole():
    assert auto_class(composite_config("gemma3")) is AutoModelForCausalLM, "which builds the tower, too"
    for kind in ("qwen3_5", "mistral3", "qwen3_vl"):
        assert auto_class(composite_config(kind)) is AutoModelForImageTextToText
    assert auto_class(composite_config("voxtral")) is AutoModelForMultimodalLM
    assert auto_class(composite_config("qwen3_5").text_config) is AutoModelForCausalLM
    text_alone = composite_config("qwen3_5")
    text_alone.architectures = ["Qwen3_5ForCausalLM"]
    assert auto_class(text_alone) is AutoModelForCausalLM
    assert auto_class(AutoConfig.for_model("t5gemma2")) is AutoModelForCausalLM, "no decoder alone: refused by its name"


def test_a_class_that_needs_images_is_refused_before_its_weights_are_loaded(tmp_path):
    sizes = {"vocab_size": 64, "embed_dim": 16, "layers": 1, "ffn_dim": 16, "attention_heads": 2}
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    seeing = AutoConfig.for_model("kosmos-2", text_config=sizes, vision_config=tower | {"image_size": 28})
    assert "pixel_values" in refuses_text(build_on_meta(seeing))
    recipe = write_recipe(tmp_path)
    seeing.save_pretrained(tmp_path / "model")
    assert codes_of(composite_findings(run_of(recipe, {}))) == ["ZR490"]
    for kind in SIZES:
        assert refuses_text(build_on_meta(composite_config(kind))) is None


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_all_linear_leaves_the_towers_out_and_a_list_of_names_is_warned_of(tmp_path, kind):
    def run(**keys):
        recipe = write_recipe(tmp_path, random_weights=False, **(LORA | keys))
        write_composite(kind, tmp_path / "model")
        return run_of(recipe, {})

    def in_towers(run) -> list[str]:
        names = [name for name, p in adapted_model(run).named_parameters() if p.requires_grad]
        return [name for name in names if "language_model" not in name]

    linear = run(lora_target_modules="all-linear")
    assert not in_towers(linear) and not codes_of(composite_findings(linear))
    assert "LoRA on" in trained_without_memory(linear)
    named = ["q_proj", "o_proj", "qkv", "proj"]
    warned = run(lora_target_modules=named)
    assert in_towers(warned) and codes_of(composite_findings(warned)) == ["ZR491"]
    (found,) = composite_findings(warned)
    pattern = re.search(r"exclude_modules: '(.*)'}", found.fix)[1]
    fixed = run(lora_target_modules=named, peft_config={"exclude_modules": pattern})
    assert adapted_model(fixed) is not None and not in_towers(fixed) and not codes_of(composite_findings(fixed))


@pytest.mark.parametrize("others", [None, ["down_proj"], r".*\.down_proj"])
def test_what_the_recipe_excludes_stays_excluded(others):
    model = build_on_meta(composite_config("gemma3"))
    adapter = peft.LoraConfig(target_modules="all-linear", exclude_modules=others)
    names = peft.get_peft_model(model, spare_towers(adapter, model)).base_model.targeted_module_names
    assert any(name.endswith("up_proj") for name in names)
    assert any(name.endswith("down_proj") for name in names) == (others is None)
    assert not any(is_within(name, tower_names(model)) for name in names)
    assert adapter.exclude_modules in (others, {*(others or ())}), "the recipe's own is not changed"


def test_fsdp2_finds_the_norm_before_the_head():
    """Of Qwen3.5 it is a child of the decoder, not of the base model: the head would train on each process's rows."""
    for kind in ("qwen3_5", "gemma3", "mistral3", "qwen3_vl"):
        model = build_on_meta(composite_config(kind))
        assert has_final_norm(model) and norm_of_decoder(model) is model.model.language_model.norm


def test_the_pattern_takes_each_tower_by_its_whole_name():
    pattern = excluding(["model.vision_tower", "model.image_newline"])
    assert re.fullmatch(pattern, "model.vision_tower.layers.0.q_proj")
    assert not re.fullmatch(pattern, "model.vision_tower2.layers.0.q_proj")
    assert not re.fullmatch(pattern, "model.language_model.vision_tower.q_proj")


def test_the_towers_take_no_part_in_the_flops():
    text = composite_config("gemma3").text_config
    text.architectures = ["Gemma3ForCausalLM"]
    alone, whole = build_on_meta(text), build_on_meta(composite_config("gemma3"))
    assert model_flops(whole) == model_flops(alone)
    flops = []
    for model in (alone, whole):
        adapter = spare_towers(peft.LoraConfig(target_modules="all-linear"), model)
        flops.append(model_flops(peft.get_peft_model(model, adapter)))
    assert flops[0] == flops[1]


def test_a_run_says_which_parts_stay_as_they_are():
    model = build_on_meta(composite_config("gemma3"))
    trained = sum(p.numel() for p in model.model.language_model.parameters())
    said = trained_parts(model)
    total = sum(p.numel() for p in model.parameters())
    assert said.startswith(f"{trained:,} of {total:,} parameters, all but vision_tower, multi_modal_projector (")
    assert "q_proj" not in said
    model.model.language_model.norm.weight.requires_grad_(False)
    assert trained_parts(model).endswith("; 1 norm.weight")


def test_a_limit_may_be_infinite_and_a_weight_may_not(tmp_path):
    """Gemma 4's towers keep the limits of their inputs beside the weights."""
    infinite = torch.tensor(float("inf"))
    save_file({"input_max": infinite, "weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    refuse_bad_numbers(entries_of(tmp_path))
    for bad in ({"input_max": infinite - infinite}, {"weight": torch.full((2, 2), float("inf"))}):
        save_file(bad, tmp_path / "model.safetensors")
        with pytest.raises(NotWhole):
            refuse_bad_numbers(entries_of(tmp_path))


def test_a_plan_counts_the_towers_as_frozen_weights():
    config = composite_config("gemma3").to_dict()
    whole = shape_of(config, settings_with())
    model = build_on_meta(composite_config("gemma3"))
    text = sum(p.numel() for p in model.model.language_model.parameters())
    total = sum(p.numel() for p in model.parameters())
    assert (whole.parameters, whole.trainable, whole.unreached) == (total, text, total - text)
    adapted = shape_of(config, settings_with(use_peft=True, lora_r=4, lora_target_modules="all-linear"))
    linear = [m for m in model.model.language_model.modules() if type(m) is torch.nn.Linear]
    assert adapted.trainable == sum(4 * (m.in_features + m.out_features) for m in linear)
    alone = shape_of(config["text_config"], settings_with())
    assert (alone.trainable, alone.unreached) == (alone.parameters, 0) == (text, 0)
