"""A step that a model's class takes in fp32, and neither in 16 bits nor with an adapter on all linear layers."""

import re

import pytest
from transformers import AutoConfig

from tests.helpers.fake_machine import run_of
from tests.helpers.tiny import settings_with
from zero_recipes.checks.small_step import small_step_findings

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
WIDTHS = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128} | HEADS
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LORA = {"use_peft": True, "lora_target_modules": "all-linear", "lora_dropout": 0.0}


def found_of(kind: str, stage: int | None, keys: dict, **sizes) -> dict:
    """{code: finding} of a run of a small model of a type."""
    config = AutoConfig.for_model(kind, **WIDTHS | sizes)
    run = run_of(settings_with(dtype="float32", **keys), stage=stage, config=config)
    return {finding.code: finding for finding in small_step_findings(run)}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_class_that_does_not_take_16_bits_is_refused(stage):
    found = found_of("minimax", stage, {"bf16": True}, **EXPERTS)
    assert "same dtype" in found["ZR483"].what and "MiniMaxForCausalLM" in found["ZR483"].what


@pytest.mark.parametrize(
    "kind, stage, keys",
    [("minimax", None, {"bf16": True}), ("minimax", 2, {"bf16": False}), ("llama", 2, {"bf16": True})],
)
def test_autocast_and_fp32_and_other_classes_are_not(kind, stage, keys):
    assert found_of(kind, stage, keys, **EXPERTS) == {}


def test_a_router_that_returns_two_tensors_takes_no_adapter():
    found = found_of("phimoe", 3, LORA | {"bf16": True}, **EXPERTS)
    assert "router" in found["ZR484"].what
    names = re.search(r"\[([^]]*)\]", found["ZR484"].fix)[1].split(", ")
    assert "q_proj" in names and "router" not in names
    assert found_of("phimoe", 3, LORA | {"bf16": True, "lora_target_modules": names}, **EXPERTS) == {}
    assert found_of("mixtral", 3, LORA | {"bf16": True}, **EXPERTS) == {}


def test_a_class_that_sees_padding_is_warned_of():
    sizes = {"dim_ff": 32, "num_attention_heads": 2, "dim_head": 16, "hidden_size": 32}
    rows = {"per_device_train_batch_size": 4, "bf16": False}
    assert "CpmAnt" in found_of("cpmant", 2, rows, **sizes)["ZR485"].what
    assert found_of("cpmant", 2, rows | {"per_device_train_batch_size": 1}, **sizes) == {}
    assert found_of("llama", 2, rows) == {}
    assert found_of("mamba", 2, rows) == {}, "what comes behind a row changes no state before it"
