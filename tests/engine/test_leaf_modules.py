"""Stage 3 by whole layers: the same numbers in fewer collectives, with an adapter too."""

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, OpenAIGPTConfig

from tests.helpers import leaf_cases
from tests.helpers.group import CaseFailed
from tests.helpers.seeded import grid
from tests.helpers.tiny import NEVER_KEPT, ROOT, write_model, write_recipe

RECOMPUTED = {"activation_checkpointing": True}
LORA = {"use_peft": True, "lora_target_modules": "all-linear"}
WORKAROUND = "zero_recipes.model.load.let_inputs_have_gradients"
OF_LISTS = "zero_recipes.model.load.return_tuples"


def written(folder, name: str, by_layer: bool, keys: dict) -> list[str]:
    config = json.loads((ROOT / "ds_configs" / "zero3.json").read_text())
    config["zero_optimization"] |= NEVER_KEPT | {"memory_efficient_linear": False}  # it rounds otherwise
    if not by_layer:
        del config["leaf_modules"]
    path = write_recipe(folder, deepspeed=config, max_steps=4, **copy.deepcopy(keys))
    return [str(path), "--output_dir", str(folder / name)]


@pytest.mark.parametrize("keys", [grid({}), grid(RECOMPUTED), LORA, grid(LORA | RECOMPUTED)])
def test_a_layer_gathered_at_once_changes_no_loss_and_no_norm(two, tmp_path, keys):
    found = []
    for by_layer in (False, True):
        argv = written(tmp_path, str(by_layer), by_layer, keys)
        found.append(two.run(leaf_cases.train_counted, argv=argv)[0])
    by_module, by_layer = found
    for key in ("loss_history", "grad_norm_history"):
        assert by_layer[key] == by_module[key], key
    assert by_layer["leaves"] == 2 and by_module["leaves"] == 0
    few, many = (each["calls"]["all_gather"] for each in (by_layer, by_module))
    assert 2 * few < many, (
        "two layers, the last norm, embedding and head; an adapter's tensors have a dtype of their own"
    )


@pytest.mark.private
def test_a_leaf_module_behind_a_frozen_embedding_is_reduced_too_early(two, tmp_path):
    argv = written(tmp_path, "out", True, LORA)
    with pytest.raises(CaseFailed, match="must match the size of tensor"):
        two.run(leaf_cases.train_counted, argv=argv, left_out=WORKAROUND)


def with_layers_that_return_lists(folder) -> dict:
    """Write an OpenAI GPT. Returns the keys of a run that it takes."""
    torch.manual_seed(0)
    config = OpenAIGPTConfig(vocab_size=1391, n_positions=256, n_embd=32, n_layer=2, n_head=2)
    model = write_model(folder / "lists")  # with a tokenizer
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    return {"model_name_or_path": str(model), "bf16": False, "dtype": "float32"}


def test_layers_that_return_lists_are_trained(two, tmp_path):
    keys = with_layers_that_return_lists(tmp_path)
    by_module, by_layer = (
        two.run(leaf_cases.train_counted, argv=written(tmp_path, str(leaves), leaves, keys))[0]
        for leaves in (False, True)
    )
    assert by_layer["leaves"] == 2
    assert by_layer["loss_history"] == by_module["loss_history"]


@pytest.mark.private
def test_gradients_of_layers_that_return_lists_would_be_left(two, tmp_path):
    argv = written(tmp_path, "out", True, with_layers_that_return_lists(tmp_path))
    with pytest.raises(CaseFailed, match="unknown parameter type"):
        two.run(leaf_cases.train_counted, argv=argv, left_out=OF_LISTS)
