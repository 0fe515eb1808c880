"""Composite models: their text model is trained, what text never reaches stays bit for bit, and all of it is saved."""

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.helpers import composite_cases
from tests.helpers.composites import composite_model, write_composite
from tests.helpers.resuming import EXACT, compare
from tests.helpers.seeded import grid
from tests.helpers.tiny import arguments, write_recipe
from zero_recipes.model.towers import is_within, tower_names

LORA = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}


def recipe_of(kind: str, folder: Path, **keys) -> Path:
    """With weight decay, which shrinks what ZeRO's optimizers hold, gradients or none."""
    usual = {"random_weights": False, "bf16": False, "max_length": 64, "weight_decay": 0.1, "save_model": True}
    recipe = write_recipe(folder, **(usual | keys))
    write_composite(kind, folder / "model")
    return recipe


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=composite_cases.ids(), use_cache=False).logits[0, -1]


def reloaded(folder: Path) -> transformers.PreTrainedModel:
    """By the class that its config.json names, as a server of images does."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model, report = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("qwen3_5", "zero2"),
        ("mistral3", "zero3"),
        ("gemma3", "fsdp2"),
        grid("gemma3", "zero2"),
        grid("gemma3", "zero3"),
        grid("gemma3", "ddp"),
        grid("gemma3", "zero3_offload"),
        grid("qwen3_5", "zero3"),
        grid("qwen3_5", "fsdp2"),
        grid("gemma4", "zero2"),
        grid("gemma4", "zero3"),
        grid("gemma4", "fsdp2"),
        grid("qwen3_vl", "zero3"),
        grid("llava_next", "zero3"),
        grid("voxtral", "zero2"),
        grid("voxtral", "fsdp2"),
    ],
)
def test_all_of_a_composite_model_is_saved_and_its_text_model_alone_trained(two, tmp_path, kind, strategy):
    recipe = recipe_of(kind, tmp_path)
    found = two.run(composite_cases.logits_of_trained, argv=arguments(recipe, strategy, tmp_path / "out"))[0]
    model = reloaded(tmp_path / "out")
    assert torch.allclose(logits(model), torch.tensor(found["logits"]), atol=1e-5)
    source, saved = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    assert saved.keys() == source.keys(), "under the names of the file that it came from"
    before, after = composite_model(kind).state_dict(), model.state_dict()
    towers = tower_names(model)
    for name in before:
        if is_within(name, towers):
            assert torch.equal(before[name], after[name]), f"{name} was trained"
    assert found["trained"] and not any(is_within(name, towers) for name in found["trained"])
    assert not torch.equal(logits(composite_model(kind)), logits(model))
    assert (tmp_path / "out" / "preprocessor_config.json").read_bytes() == (
        tmp_path / "model" / "preprocessor_config.json"
    ).read_bytes()


@pytest.mark.parametrize(("kind", "strategy"), [("qwen3_5", "zero3"), grid("gemma3", "zero2"), grid("gemma4", "fsdp2")])
def test_an_adapter_loads_on_the_composite_class(two, tmp_path, kind, strategy):
    recipe = recipe_of(kind, tmp_path, **LORA)
    found = two.run(composite_cases.logits_of_trained, argv=arguments(recipe, strategy, tmp_path / "out"))[0]
    base = type(composite_model(kind)).from_pretrained(tmp_path / "model", dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "out"))
    assert torch.allclose(logits(adapted), torch.tensor(found["logits"]), atol=1e-5)
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert saved and not any(is_within(name.removeprefix("base_model.model."), tower_names(base)) for name in saved)
    assert all(saved[name].any() for name in saved), "each of its matrices has had a gradient"


@pytest.mark.parametrize("strategy", [grid("zero3"), grid("zero2"), grid("fsdp2")])
def test_a_composite_model_is_resumed_bit_for_bit(two, tmp_path, strategy):
    shape = {
        "bf16": False,
        "random_weights": False,
        "model_name_or_path": str(tmp_path / "composite"),
        "max_length": 64,
    }
    shutil.copytree(recipe_of("gemma3", tmp_path / "made").parent / "model", tmp_path / "composite")
    assert compare(two, tmp_path, strategy, **shape) == EXACT
