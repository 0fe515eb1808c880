"""Every committed recipe, ds_config and accelerate config is valid."""

from pathlib import Path

import pytest

from zero_recipes.config import recipe as recipes
from zero_recipes.config import strategy
from zero_recipes.model import sizes_of

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
ACCELERATE = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
DS_CONFIGS = sorted((ROOT / "ds_configs").glob("*.json"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_parses_and_trl_takes_it(path, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    recipe = recipes.parse_recipe(path, recipes.read_recipe_file(path), [])
    settings = recipe.settings.replace(use_cpu=True, output_dir=str(tmp_path))
    _, training_args, model_args, _ = recipes.trl_arguments(settings, path)
    assert settings.dataset_format == "alpaca"
    assert (training_args.bf16, training_args.fp16) == (path.stem[-5:] != "-fp16", path.stem[-5:] == "-fp16")
    assert model_args.dtype == "float32", "ddp would train without an fp32 master"
    recipes.write_resolved(recipe.explicit, tmp_path / "resolved.yaml", ["x"], None)
    again = recipes.parse_recipe(tmp_path / "resolved.yaml", recipes.read_recipe_file(tmp_path / "resolved.yaml"), [])
    assert again.explicit == recipe.explicit


def test_both_folders_hold_the_same_strategies():
    assert {path.stem for path in ACCELERATE} == {path.stem for path in DS_CONFIGS} | {"ddp", "fsdp2", "multi_node"}
    tiny = ROOT / "recipes" / "tiny.yaml"
    for path in DS_CONFIGS:
        recipe = recipes.parse_recipe(tiny, recipes.read_recipe_file(tiny), ["--deepspeed", str(path)])
        assert strategy.resolve_strategy(recipe.settings, {}, sizes_of).name == path.stem
