"""Every committed recipe, ds_config and accelerate config is valid."""

from pathlib import Path

import pytest

from zero_recipes.config import recipe as recipes

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_parses_and_trl_takes_it(path, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    recipe = recipes.parse_recipe(path, recipes.read_recipe_file(path), [])
    settings = recipe.settings.replace(use_cpu=True, output_dir=str(tmp_path))
    _, training_args, model_args, _ = recipes.trl_arguments(settings, path)
    assert settings.dataset_format == "alpaca" or training_args.assistant_only_loss, "questions would carry loss"
    assert (training_args.bf16, training_args.fp16) == (path.stem[-5:] != "-fp16", path.stem[-5:] == "-fp16")
    assert model_args.dtype == "float32", "ddp would train without an fp32 master"
    recipes.write_resolved(recipe.explicit, tmp_path / "resolved.yaml", ["x"], None)
    again = recipes.parse_recipe(tmp_path / "resolved.yaml", recipes.read_recipe_file(tmp_path / "resolved.yaml"), [])
    assert again.explicit == recipe.explicit
