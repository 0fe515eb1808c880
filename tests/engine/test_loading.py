"""A run begins with the checkpoint's weights, all of them and no others, or it is refused with the tensor's name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from tests.helpers.tiny import write_recipe

STRATEGIES = pytest.mark.parametrize("strategy", ["ddp", "zero3"])  # the two ways of transformers to load
QUERY = "gpt_neox.layers.1.attention.query_key_value.weight"
RENAMED = QUERY.replace("query_key_value", "qkv")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """One step on a model with weights."""
    folder = tmp_path_factory.mktemp("loading")
    path = write_recipe(folder, random_weights=False, max_steps=1)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model")).save_pretrained(folder / "model")
    return path


def damaged(recipe: Path, folder: Path, strategy: str, change) -> list[str]:
    """The recipe's arguments with a copy of its model whose tensors went through `change`."""
    copy = folder / change.__name__
    if not copy.exists():
        shutil.copytree(recipe.parent / "model", copy)
        tensors = load_file(copy / "model.safetensors")
        change(tensors)
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return on(recipe, folder, strategy, copy)


def on(recipe: Path, folder: Path, strategy: str, model: Path) -> list[str]:
    argv = [str(recipe), "--output_dir", str(folder / "out"), "--model_name_or_path", str(model)]
    return argv if strategy == "ddp" else [*argv, "--deepspeed", f"ds_configs/{strategy}.json"]


def rename(tensors: dict) -> None:
    tensors[RENAMED] = tensors.pop(QUERY)


def resize(tensors: dict) -> None:
    tensors[QUERY] = tensors[QUERY][:-3].clone()


def age(tensors: dict) -> None:
    """Buffers that Pythia's checkpoints hold and today's GPTNeoX does not."""
    for layer in range(2):
        name = f"gpt_neox.layers.{layer}.attention"
        tensors[f"{name}.bias"] = torch.ones(1, 1, 256, 256, dtype=torch.bool)
        tensors[f"{name}.masked_bias"] = torch.tensor(-1e9)
        tensors[f"{name}.rotary_emb.inv_freq"] = torch.ones(2)


@STRATEGIES
def test_other_tensors_than_the_models_are_refused_by_name_unless_the_recipe_allows_them(
    two, recipe, tmp_path, strategy
):
    for said in two.run("refusal_of", argv=damaged(recipe, tmp_path, strategy, resize)):
        assert said.endswith(f"mismatched keys {QUERY} [ZR408]")
    renamed = damaged(recipe, tmp_path, strategy, rename)
    for said in two.run("refusal_of", argv=renamed):
        missing, unexpected = said.splitlines()
        assert missing.endswith(f"missing keys {QUERY} [ZR408]")
        assert unexpected.endswith(f"unexpected keys {RENAMED} [ZR408]")
    for said in two.run("refusal_of", argv=[*renamed, "--allow_keys", QUERY]):
        assert "missing" not in said and "unexpected keys" in said
    assert not (tmp_path / "out").exists(), "refused before the folder is touched"
    two.run("train", argv=[*renamed, "--allow_keys", QUERY, RENAMED])


@STRATEGIES
def test_what_the_model_itself_ignores_and_tied_weights_are_no_refusal(two, recipe, tmp_path, strategy):
    result = two.run("train", argv=damaged(recipe, tmp_path, strategy, age))[0]
    assert result["metrics"]["status"] == "ok"
    folder = Path(shutil.copytree(recipe.parent / "model", tmp_path / "tied"))
    config = LlamaConfig(
        vocab_size=1031, hidden_size=32, intermediate_size=50, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    argv = [*on(recipe, tmp_path, strategy, folder), "--overwrite", "true"]
    assert two.run("train", argv=argv)[0]["metrics"]["status"] == "ok"


@pytest.mark.private
def test_transformers_alone_would_not_say_so_at_stage_3(two, recipe, tmp_path):
    """Fails when transformers reports unexpected keys at stage 3: then model.refuse_other_keys may go."""
    argv = damaged(recipe, tmp_path, "zero3", rename)
    assert two.run("equivalence_cases.keys_reported_by_transformers", argv=argv)[0] == {
        "missing_keys": [QUERY],
        "unexpected_keys": [],
    }
