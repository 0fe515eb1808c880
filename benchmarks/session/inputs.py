"""Models without weights, rows and recipes of the runs: made from this repository alone, for there is no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from benchmarks.session.cases import Case

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "zero_recipes" / "plan" / "models"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
ROWS, LENGTH = 512, 512  # of the data, and tokens of a row
BASE = {
    "bf16": True,
    "max_length": LENGTH,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "max_steps": 5,
    "learning_rate": 1.0e-5,
    "activation_checkpointing": False,
    "attn_implementation": "sdpa",
    "seed": 0,
}
ALWAYS = {"eval_strategy": "no", "save_strategy": "no", "save_model": False, "logging_steps": 1, "report_to": "none"}


def write_recipe(case: Case, work: Path) -> Path:
    """The case's recipe, its model's folder and its rows beneath `work`.

    The run makes no plan of its own (`skip_plan`): it is compared with one made before.
    """
    saves = case.keys.get("save_model", False)
    if case.model == "tiny":
        recipe = yaml.safe_load((ROOT / "recipes" / "tiny.yaml").read_text())
        recipe |= {"model_name_or_path": str(ROOT / "tiny_world" / "base"), "dataset_name": str(ROOT / "tiny_world")}
        recipe |= {"save_model": False} | ({} if saves else {"eval_strategy": "no", "sample_prompts": None})
    else:
        recipe = _shaped(case.model, work)
    recipe |= case.keys | {"skip_plan": True, "overwrite": True}
    if case.strategy.endswith("_infinity"):
        swap = work / "swap"
        swap.mkdir(parents=True, exist_ok=True)
        recipe["nvme_path"] = str(swap)
    path = work / case.slug / "recipe.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({key: value for key, value in recipe.items() if value is not None}))
    return path


def _shaped(model: str, work: Path) -> dict[str, Any]:
    """A shape under `BASE`, or a shipped recipe on such a shape and full rows: its model and data are on a hub."""
    recipe = dict(BASE)
    if model.endswith(".yaml"):
        recipe = yaml.safe_load((ROOT / model).read_text())
        model = recipe["model_name_or_path"].rpartition("/")[2].removesuffix("-deduped")
        for key in ("dataset_format", "datasets", "test_split_size", "sample_prompts", "sample_max_new_tokens"):
            recipe.pop(key, None)
    folder = model_folder(model, work)
    return recipe | ALWAYS | {"model_name_or_path": str(folder), "random_weights": True, "dataset_name": _rows(work)}


def model_folder(name: str, work: Path) -> Path:
    """A folder with a shape's config (plan/models/) and the tiny world's tokenizer, and no weights."""
    config = json.loads((MODELS / f"{name}.json").read_text())["config"]
    folder = work / "models" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for file in TOKENIZER:
        (folder / file).write_bytes((ROOT / "tiny_world" / "base" / file).read_bytes())
    return folder


def _rows(work: Path) -> str:
    """Rows longer than any `max_length` here, so that every batch is full, as a plan takes it."""
    folder = work / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    text = "the red fish hums in the cave by the river . " * (LENGTH // 4)
    (folder / "train.jsonl").write_text((json.dumps({"text": text}) + "\n") * ROWS)
    return str(folder)
