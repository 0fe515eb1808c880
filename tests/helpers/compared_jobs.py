"""Jobs that are both simulated and trained: a recipe whose every micro batch has the size that the plan takes."""

import json
from pathlib import Path

from tests.helpers import tiny
from zero_recipes.config import recipe as recipes
from zero_recipes.config.recipe import Settings
from zero_recipes.tools.plan.job import Job


def write_recipe(folder: Path, model: Path, keys: dict) -> Path:
    """Every micro batch holds one row of max_length and a short one: padded to what the plan takes."""
    rows = folder / "compared"
    rows.mkdir()
    words = "the red fish hums in the cave by the river . "
    lines = [json.dumps({"text": words * (2 if i % 2 else 40)}) for i in range(64)]
    (rows / "train.jsonl").write_text("\n".join(lines) + "\n")
    (rows / "test.jsonl").write_text("\n".join(lines[:48]) + "\n")
    usual = {"model_name_or_path": str(model), "dataset_name": str(rows), "dataset_format": None, "max_steps": 6}
    return tiny.write_recipe(folder, **usual | {"train_sampling_strategy": "sequential"} | keys)


def job_of(path: Path, model: Path, strategy: str, ranks: int = 2) -> Job:
    recipe = recipes.parse_recipe(path, recipes.read_recipe_file(path), [])
    plain = {key: getattr(value, "value", value) for key, value in recipe.settings.as_dict().items()}
    ds_config = (
        None if strategy == "single" else json.loads((tiny.ROOT / "ds_configs" / f"{strategy}.json").read_text())
    )
    config = json.loads((model / "config.json").read_text())
    return Job(str(model), config, Settings(plain), strategy, None, ranks, ranks, "cpu").under(strategy, ds_config)
