"""Models without weights, rows and recipes of the runs: made from this repository alone, for there is no network."""

import json
from pathlib import Path

import yaml

from benchmarks.session.cases import TABLE, Case

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "tiny_world" / "base"
MODELS = ROOT / "zero_recipes" / "plan" / "models"


def write_recipe(case: Case, work: Path) -> Path:
    """The case's recipe, its model's folder and its rows beneath `work`.

    The run makes no plan of its own (`skip_plan`): it is compared with one made before.
    """
    if case.model == "tiny":
        recipe = yaml.safe_load((ROOT / "recipes" / "tiny.yaml").read_text())
        recipe |= {"model_name_or_path": str(BASE), "dataset_name": str(BASE.parent)}
    else:
        recipe = TABLE["base"] | {"model_name_or_path": str(model_folder(case.model, work)), "dataset_name": rows(work)}
    recipe |= case.keys | {"skip_plan": True, "overwrite": True}
    if case.strategy.endswith("_infinity"):
        (work / "swap").mkdir(parents=True, exist_ok=True)
        recipe["nvme_path"] = str(work / "swap")
    path = work / case.slug / "recipe.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({key: value for key, value in recipe.items() if value is not None}))
    return path


def model_folder(name: str, work: Path) -> Path:
    """A folder with a shape's config and the tiny world's tokenizer, and no weights."""
    folder = work / "models" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(json.loads((MODELS / f"{name}.json").read_text())["config"]))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((BASE / file).read_bytes())
    return folder


def rows(work: Path) -> str:
    """Rows longer than any `max_length` here, so that every batch is full, as a plan takes it."""
    folder = work / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    text = "the red fish hums in the cave by the river . " * 256
    (folder / "train.jsonl").write_text((json.dumps({"text": text}) + "\n") * 512)
    return str(folder)
