"""Weights are loaded by class; TRL's split of a mixture."""

import json

import numpy
import pytest
import torch
from datasets import disable_caching, enable_caching
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, set_seed
from trl import DatasetMixtureConfig, ModelConfig, get_dataset, get_quantization_config

from tests.helpers.tiny import ROOT, settings_with
from zero_recipes.data.load import load_splits


@pytest.mark.private
def test_loading_by_class_is_still_needed(tmp_path):
    """Fails when transformers renames on resume: then remove faults/renamed_weights.py."""
    model = AutoModelForCausalLM.from_pretrained(ROOT / "tiny_world" / "base")
    model.save_pretrained(tmp_path)
    assert model.load_state_dict(load_file(tmp_path / "model.safetensors"), False).missing_keys == ["lm_head.weight"]


def test_4_bit_weights_are_still_multiplied_in_the_dtype_of_loading():
    """Fails when TRL takes another than dtype, whose default is float32: then ZR417 is about memory alone."""
    assert get_quantization_config(ModelConfig(load_in_4bit=True)).bnb_4bit_compute_dtype == torch.float32


def test_a_split_is_drawn_by_the_recipes_seed_as_trl_draws_it_once_it_is_seeded(tmp_path):
    """TRL 1.16 (scripts/utils.py, get_dataset) draws from the global generator: two launches test on different rows."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": str(i)}) + "\n" for i in range(200)))
    mixture = {"datasets": [{"path": str(tmp_path)}], "test_split_size": 0.2}

    def ours(seed: int) -> list[str]:
        numpy.random.seed(seed + 1000)  # whatever was drawn before
        return load_splits(settings_with(seed=seed, **mixture))[0]["test"]["text"]

    disable_caching()
    try:
        wanted = ours(3)
        assert ours(3) == wanted != ours(4)
        set_seed(3)
        assert get_dataset(DatasetMixtureConfig(**mixture))["test"]["text"] == wanted
    finally:
        enable_caching()
