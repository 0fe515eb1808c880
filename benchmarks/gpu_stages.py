"""The stages on one GPU: python benchmarks/gpu_stages.py [--strategies ...] [--steps 20]

Runs recipes/tiny.yaml and a model of Pythia-410M's shape (random weights, the tiny world's tokenizer and rows) at world
size 1 through the real launcher, and keeps each metrics.json under benchmarks/results/<device>/<model>/<strategy>/.
No network is needed. NOT RUN YET on a GPU: no such results are committed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import yaml
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.pythia_model_states import config  # noqa: E402
from zero_recipes.cli.sweep import sweep  # noqa: E402
from zero_recipes.report import write_report  # noqa: E402

SHAPE = "pythia-410m"


def shaped_recipe(folder: Path) -> Path:
    """A recipe on a folder with Pythia-410M's config and no weights."""
    model = folder / SHAPE
    config(SHAPE).save_pretrained(model)
    AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base").save_pretrained(model)
    recipe = yaml.safe_load((ROOT / "recipes" / "tiny.yaml").read_text())
    recipe |= {"model_name_or_path": str(model), "random_weights": True, "learning_rate": 1.0e-4}
    path = folder / f"{SHAPE}-shape.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategies", default="zero0,zero1,zero2,zero3")
    parser.add_argument("--steps", default="20")
    parser.add_argument("--work", type=Path, default=ROOT / "output" / "gpu_stages")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    overrides = [
        "--max_steps",
        arguments.steps,
        "--eval_strategy",
        "no",
        "--sample_prompts",
        "0",
        "--overwrite",
        "true",
    ]
    for recipe in (ROOT / "recipes" / "tiny.yaml", shaped_recipe(arguments.work)):
        folder = arguments.work / recipe.stem
        for outcome in sweep(recipe, arguments.strategies.split(","), 1, folder, overrides):
            row = json.loads((outcome.folder / "metrics.json").read_text())
            device = row.get("device", "unknown").replace(" ", "-")
            kept = ROOT / "benchmarks" / "results" / device / recipe.stem / outcome.strategy
            kept.mkdir(parents=True, exist_ok=True)
            shutil.copy(outcome.folder / "metrics.json", kept / "metrics.json")
        write_report(folder)


if __name__ == "__main__":
    main()
