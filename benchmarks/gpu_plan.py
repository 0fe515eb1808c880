"""The plan against one GPU: python benchmarks/gpu_plan.py -> benchmarks/results/<device>/plan.json

Eight runs of a model of Pythia-410M's shape (random weights, rows of full length) at world size 1: stages 0 to 3, CPU
offload, LoRA, activation checkpointing, a larger micro batch. Each is planned with this machine's own torch, trained
for five steps, and held against `max_memory_allocated` and `max_memory_reserved` of metrics.json. Goal: 3 % on the
allocated peak. No network is needed. NOT RUN YET on a GPU: no such result is committed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.chdir(ROOT)

from benchmarks.gpu_stages import shaped_recipe  # noqa: E402
from zero_recipes.core.files import write_json  # noqa: E402

LENGTH = 512
CONFIGURATIONS = {
    "stage 0": ("zero0", []),
    "stage 1": ("zero1", []),
    "stage 2": ("zero2", []),
    "stage 3": ("zero3", []),
    "stage 2, CPU offload": ("zero2_offload", []),
    "stage 3, LoRA": ("zero3", ["--use_peft", "true", "--lora_target_modules", "all-linear"]),
    "stage 2, checkpointing": ("zero2", ["--activation_checkpointing", "true"]),
    "stage 2, micro batch 16": ("zero2", ["--per_device_train_batch_size", "16"]),
}


def full_rows(folder: Path) -> Path:
    """The shape's recipe on rows longer than `LENGTH` tokens, so that every batch is as the plan takes it."""
    recipe = yaml.safe_load(shaped_recipe(folder).read_text())
    rows = folder / "rows"
    rows.mkdir(exist_ok=True)
    line = json.dumps({"text": "the red fish hums in the cave by the river . " * 200})
    (rows / "train.jsonl").write_text(f"{line}\n" * 256)
    for key in ("dataset_format", "dataset_test_split", "sample_prompts", "global_batch_size"):
        recipe.pop(key, None)
    recipe |= {"dataset_name": str(rows), "max_length": LENGTH, "eval_strategy": "no", "max_steps": 5}
    path = folder / "full-rows.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / "output" / "gpu_plan")
    work = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)
    recipe = full_rows(work)
    rows, device = {}, "unknown"
    for name, (strategy, overrides) in CONFIGURATIONS.items():
        folder = work / name.replace(", ", "-").replace(" ", "-")
        command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--config_file"]
        command += [f"accelerate_configs/{strategy}.yaml", "run_sft.py", str(recipe), "--output_dir", str(folder)]
        command += ["--predict", "true", "--save_model", "false", "--overwrite", "true", *overrides]
        subprocess.run(command, check=True)
        metrics = json.loads((folder / "metrics.json").read_text())
        device, peak, planned = metrics["device"], metrics["peak_memory_bytes"][0], metrics["predicted"]
        rows[name] = {
            "predicted": planned,
            "measured": peak,
            "allocated_ratio": planned["peak_memory_bytes"] / peak["allocated"],
            "versions": metrics["versions"],
        }
        print(f"{name}: planned {planned['peak_memory_bytes']:,}, allocated {peak['allocated']:,}", flush=True)
    write_json(ROOT / "benchmarks" / "results" / device.replace(" ", "-") / "plan.json", rows)


if __name__ == "__main__":
    main()
