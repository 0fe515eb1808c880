"""Tokens that a chat template's tokenizer adds: LoRA trains their embeddings, under each strategy the same."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers import cases
from tests.helpers.tiny import ROOT, arguments, llama_config, write_recipe

TEMPLATE = """{% for m in messages %}<|turn|>{{ m['role'] }}: {{ m['content'] }}<|endoftext|>{% endfor %}"""


def write_chat(folder: Path, **keys) -> Path:
    """A recipe of LoRA on a Llama whose head is its own, with a template that brings the token <|turn|>."""
    usual = {"dataset_name": str(folder / "turns"), "dataset_format": None, "random_weights": False}
    usual |= {"chat_template_path": str(folder / "added"), "use_peft": True, "lora_r": 4, "lora_dropout": 0.0}
    recipe = write_recipe(folder, **(usual | {"lora_target_modules": ["q_proj"]} | keys))
    model = folder / "model"
    (model / "model.safetensors").unlink(missing_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base")
    torch.manual_seed(0)
    config = llama_config(vocab_size=len(tokenizer), tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    tokenizer.add_tokens("<|turn|>", special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "added")
    (folder / "turns").mkdir()
    rows = []
    for number in range(24):
        answer = {"role": "assistant", "content": f"The fish says {number}."}
        rows.append({"messages": [{"role": "user", "content": f"Say {number}."}, answer]})
    (folder / "turns" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return recipe


def trained_by(group, recipe: Path, folder: Path) -> tuple[list[float], dict]:
    """(losses, the adapter's tensors) of a run of the strategy that `folder` is named after."""
    argv = arguments(recipe, folder.name, folder, "--save_model", "true")
    losses = group.run(cases.train, argv=argv)[0]["metrics"]["loss_history"]
    return losses, load_file(folder / "adapter_model.safetensors")


def test_new_tokens_train_at_stage_3_as_under_ddp(two, tmp_path):
    recipe = write_chat(tmp_path, bf16=False)
    wanted, of_ddp = trained_by(two, recipe, tmp_path / "ddp")
    losses, of_stage_3 = trained_by(two, recipe, tmp_path / "zero3")
    assert losses == pytest.approx(wanted, rel=1e-5)
    (tokens,) = [name for name in of_ddp if "trainable_tokens" in name]
    trained = [name for name in of_stage_3 if "original_module" not in name and "base_layer" not in name]
    assert {tokens, "base_model.model.lm_head.weight"} < {*trained}
    for name in trained:
        assert torch.allclose(of_stage_3[name], of_ddp[name], rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize(
    "keys", [{}, {"chat_template_path": None, "dataset_format": "alpaca", "lora_modules_to_save": ["lm_head"]}]
)
def test_what_trains_whole_beside_an_adapter_at_stage_3_in_16_bits(two, tmp_path, keys):
    """New tokens with TRL's lm_head, and a head that the recipe names."""
    recipe = write_chat(tmp_path, bf16=True, **keys)
    if keys:
        recipe.write_text(json.dumps(json.loads(recipe.read_text()) | {"dataset_name": str(tmp_path / "rows")}))
    wanted, _ = trained_by(two, recipe, tmp_path / "zero2")
    losses, saved = trained_by(two, recipe, tmp_path / "zero3")
    assert losses == pytest.approx(wanted, rel=1e-3)
    assert losses[0] != losses[-1] and "base_model.model.lm_head.weight" in saved
