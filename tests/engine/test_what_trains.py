"""What trains is what the recipe names: modules, and LoRA+'s rates under a scheduler of the ds_config."""

import json
from pathlib import Path

import pytest

from tests.helpers import what_trains_cases
from tests.helpers.faults import run_of
from tests.helpers.tiny import arguments, write_recipe
from zero_recipes.checks.adapter_rules import trained_without_memory

LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["query_key_value"], "lora_dropout": 0.0}
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}


def with_schedule(folder: Path, name: str, stage: int, kind: str, parameters: dict) -> list[str]:
    config = json.loads(Path(f"ds_configs/zero{stage}.json").read_text())
    config["scheduler"] = {"type": kind, "params": parameters}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return ["--deepspeed", str(path)]


@pytest.mark.parametrize(
    ("stage", "kind", "parameters", "of_transformers"),
    [
        (2, "WarmupLR", WARMUP, "constant_with_warmup"),
        (3, "WarmupDecayLR", WARMUP | {"total_num_steps": "auto"}, "linear"),
    ],
)
def test_loraplus_keeps_its_ratio_in_each_step(two, tmp_path, stage, kind, parameters, of_transformers):
    keys = {"bf16": False, "max_steps": 6, "warmup_steps": 2, "loraplus_lr_ratio": 16.0, "learning_rate": 1e-3}
    recipe = write_recipe(tmp_path, lr_scheduler_type=of_transformers, **(LORA | keys))
    plain = two.run(what_trains_cases.rates, argv=arguments(recipe, "ddp", tmp_path / "ddp"))[0]
    own = with_schedule(tmp_path, "own", stage, kind, parameters)
    found = two.run(what_trains_cases.rates, argv=[*arguments(recipe, "ddp", tmp_path / "own"), *own])[0]
    assert plain[2] == pytest.approx([1e-3, 16e-3])
    assert found[0] == [0.0, 0.0]
    for rates, wanted in zip(found[1:], plain[:-1], strict=True):  # DeepSpeed's warm-up begins a step later
        assert rates == pytest.approx(wanted)


@pytest.mark.parametrize("keys", [{}, LORA | {"lora_modules_to_save": ["lm_head"]}])
def test_each_rank_of_stage_3_says_what_check_says(two, tmp_path, keys):
    recipe = write_recipe(tmp_path, max_steps=1, **keys)
    said = two.run(what_trains_cases.said, argv=arguments(recipe, "zero3", tmp_path / "out"))
    assert said == [trained_without_memory(run_of(recipe, {}))] * 2
