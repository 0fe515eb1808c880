"""Every committed recipe, ds_config and accelerate config is valid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from datasets import Dataset

from zero_recipes.config import recipe as recipes
from zero_recipes.config import strategy
from zero_recipes.data.load import format_rows
from zero_recipes.model import sizes_of

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
ACCELERATE = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
DS_CONFIGS = sorted((ROOT / "ds_configs").glob("*.json"))
OWNED_BY_THE_TRAINER = (
    "gradient_clipping",
    "gradient_accumulation_steps",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_parses_and_trl_takes_it(path, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    recipe = recipes.parse_recipe(path, recipes.read_recipe_file(path), [])
    settings = recipe.settings.replace(use_cpu=True, output_dir=str(tmp_path))
    _, training_args, model_args, _ = recipes.trl_arguments(settings, path)
    assert settings.dataset_format == "alpaca"
    assert (training_args.bf16, training_args.fp16) == (path.stem[-5:] != "-fp16", path.stem[-5:] == "-fp16")
    assert model_args.dtype == "float32", "ddp would train without an fp32 master"
    recipes.write_resolved(recipe.given, tmp_path / "resolved.yaml", ["x"], None)
    again = recipes.parse_recipe(tmp_path / "resolved.yaml", recipes.read_recipe_file(tmp_path / "resolved.yaml"), [])
    assert again.given == recipe.given


@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda path: path.stem)
def test_a_ds_config_says_what_its_name_says(path):
    config = json.loads(path.read_text())
    zero = config["zero_optimization"]
    assert zero["stage"] == int(path.stem[4])
    offloads = "offload_optimizer" in zero or "offload_param" in zero
    assert offloads == path.stem.endswith(("_offload", "_infinity"))
    assert ("offload_param" in zero) == (path.stem in ("zero3_offload", "zero3_infinity", "zero3_offload_infinity"))
    assert all(config[key] == "auto" for key in OWNED_BY_THE_TRAINER)
    assert config["bf16"]["enabled"] == config["fp16"]["enabled"] == "auto"
    assert zero.get("stage3_gather_16bit_weights_on_model_save", False) == (zero["stage"] == 3)


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_an_accelerate_config_points_at_its_ds_config(path):
    config = yaml.safe_load(path.read_text())
    assert "use_cpu" not in config and "mixed_precision" not in config, "one set serves CPU and GPU, any precision"
    if path.stem == "ddp":
        assert config["distributed_type"] == "MULTI_GPU"
    elif path.stem == "multi_node":
        assert config["deepspeed_config"]["deepspeed_config_file"] == "ds_configs/zero3.json"
        assert config["num_machines"] == 2 and config["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"
    elif path.stem == "fsdp2":
        assert config["distributed_type"] == "FSDP" and config["fsdp_config"]["fsdp_version"] == 2
    else:
        assert config["deepspeed_config"]["deepspeed_config_file"] == f"ds_configs/{path.stem}.json"
        assert config["deepspeed_config"]["zero3_init_flag"] == path.stem.startswith("zero3")


def test_both_folders_hold_the_same_strategies():
    assert {path.stem for path in ACCELERATE} == {path.stem for path in DS_CONFIGS} | {"ddp", "fsdp2", "multi_node"}
    tiny = ROOT / "recipes" / "tiny.yaml"
    for path in DS_CONFIGS:
        recipe = recipes.parse_recipe(tiny, recipes.read_recipe_file(tiny), ["--deepspeed", str(path)])
        assert strategy.resolve_strategy(recipe.settings, {}, sizes_of).name == path.stem


WITH_DEEPSPEED = [
    ("pythia-zero2", "pythia", "zero2"),
    ("pythia-zero3", "pythia", "zero3"),
    ("pythia-410m-zero2-fp16", "pythia-410m-fp16", "zero2"),
]


@pytest.mark.parametrize(("name", "job", "strategy_name"), WITH_DEEPSPEED)
def test_a_recipe_that_names_its_ds_config_is_the_same_job_otherwise(name, job, strategy_name, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = Path("recipes") / f"{name}.yaml"
    mapping, other = (yaml.safe_load((ROOT / "recipes" / f"{each}.yaml").read_text()) for each in (name, job))
    assert mapping.pop("deepspeed") == f"ds_configs/{strategy_name}.json" and mapping == other
    recipe = recipes.parse_recipe(path, recipes.read_recipe_file(path), [])
    found = strategy.resolve_strategy(recipe.settings, {"WORLD_SIZE": "2"}, sizes_of)
    assert found.name == strategy_name and found.source == f"ds_configs/{strategy_name}.json"


def test_rows_with_longalpacas_columns_are_taken_in_alpacas_format():
    """`input` is null in its long rows, and a column `file` names the book or paper that they are about."""
    long = {"instruction": "Below is a paper. Whose is it?", "input": None, "output": "Ours.", "file": "a paper"}
    short = {"instruction": "Add.", "input": "1 and 2", "output": "3", "file": None}
    rows = format_rows(Dataset.from_list([long, short]))
    assert rows.column_names == ["prompt", "completion"] and rows["completion"][0] == "Ours."
    assert "Whose is it?" in rows["prompt"][0] and "### Input" not in rows["prompt"][0]
    assert "### Input:\n1 and 2" in rows["prompt"][1]
