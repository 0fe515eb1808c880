"""The planned memory of each shipped recipe on the GPUs that it is for: python -m benchmarks.recipe_plans [RECIPE ...]

Writes results/recipe_plans.json, and the ranges in the recipes' headers. docs/recipes.md is made from the former
(scripts/reference.py). Needs no GPU, and an hour of processor time for all recipes. The plans of recipes that are not
named stay as they are.
"""

import json
import os
import re
import sys
from pathlib import Path

from zero_recipes.core.files import write_json
from zero_recipes.core.measured_on import hardware_facts, library_versions
from zero_recipes.engine.warnings import quieten
from zero_recipes.metrics.schema import Prediction
from zero_recipes.tools.arguments import parse_arguments
from zero_recipes.tools.plan.command import requested
from zero_recipes.tools.plan.job import Job
from zero_recipes.tools.plan.predict import Predictor

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "recipe_plans.json"
SECONDS = 3600.0  # for all simulations
# recipe: GPUs, their name for `zero-recipes plan --gpu`, the strategy (None: the recipe's own ds_config)
MACHINES = {
    "gemma-3-1b-lora": [(1, "rtx4090-24gb", "single")],
    "gemma-3-4b-lora": [(1, "rtx4090-24gb", "single")],
    "gemma-4-12b-lora": [(1, "l40s-48gb", "single")],
    "gemma-4-e4b-lora": [(1, "l40s-48gb", "single")],
    "glm-4.7-flash-lora": [(1, "h200-141gb", "single")],
    "gpt-oss-20b-lora": [(1, "h100-80gb", "single"), (1, "h200-141gb", "single")],
    "granite-4.0-h-micro": [(1, "h100-80gb", "single")],
    "granite-4.0-h-small-lora": [(1, "h200-141gb", "single")],
    "lfm2.5-1.2b": [(1, "a100-40gb", "single")],
    "llama-3.1-8b": [(4, "h100-80gb", "zero2"), (4, "h100-80gb", "zero3")],
    "llama-3.1-8b-lora": [(1, "a100-40gb", "single"), (2, "rtx4090-24gb", "zero3")],
    "llama-3.1-8b-qlora": [(1, "rtx4090-24gb", "single")],
    "llama-3.2-1b": [(1, "a100-40gb", "single")],
    "llama-3.2-3b-lora": [(1, "rtx4090-24gb", "single")],
    "ministral-3-8b-lora": [(1, "a100-40gb", "single")],
    "mistral-7b-qlora": [(1, "rtx4090-24gb", "single")],
    "mistral-small-24b-lora": [(1, "h100-80gb", "single")],
    "nemotron-3-nano-lora": [(1, "h200-141gb", "single")],
    "olmo-2-7b": [(4, "h100-80gb", "zero2"), (4, "h100-80gb", "zero3")],
    "olmo-3-7b": [(4, "h100-80gb", "zero2"), (4, "h100-80gb", "zero3")],
    "phi-4-lora": [(1, "l40s-48gb", "single")],
    "pythia": [(2, "h200-141gb", "zero2"), (2, "h100-80gb", "zero3")],
    "pythia-12b": [(1, "rtx4090-24gb", "zero3_infinity"), (2, "rtx4090-24gb", "zero3_offload")],
    "pythia-2.8b": [(2, "a100-80gb", "zero2"), (2, "a100-80gb", "zero3")],
    "pythia-410m": [(1, "rtx4090-24gb", "single"), (2, "rtx4090-24gb", "zero2")],
    "pythia-410m-fp16": [(2, "t4-16gb", "zero2")],
    "pythia-410m-zero2-fp16": [(2, "t4-16gb", None)],
    "pythia-fast": [(2, "h200-141gb", "zero2"), (2, "h100-80gb", "zero3")],
    "pythia-full": [(2, "h200-141gb", "zero2"), (2, "h100-80gb", "zero3")],
    "pythia-lora": [(2, "a100-40gb", "zero2"), (2, "rtx4090-24gb", "zero3")],
    "pythia-qlora": [(2, "rtx4090-24gb", "zero2")],
    "pythia-zero2": [(2, "h200-141gb", None)],
    "pythia-zero3": [(2, "h100-80gb", None)],
    "qwen-long": [(2, "h100-80gb", "zero3")],
    "qwen3.5-4b": [(2, "h100-80gb", "zero2"), (4, "a100-40gb", "zero3")],
    "qwen3.5-4b-lora": [(1, "rtx4090-24gb", "single")],
    "qwen3.5-9b": [(4, "h100-80gb", "zero2"), (4, "h100-80gb", "zero3")],
    "qwen3.5-9b-lora": [(1, "a100-40gb", "single")],
    "qwen3.6-27b-lora": [(1, "h100-80gb", "single")],
    "qwen3.6-35b-a3b-lora": [(1, "h200-141gb", "single")],
    "qwen3-0.6b": [(1, "rtx4090-24gb", "single")],
    "qwen3-4b": [(2, "h100-80gb", "zero2"), (4, "a100-40gb", "zero3")],
    "qwen3-4b-code-lora": [(1, "rtx4090-24gb", "single")],
    "qwen3-4b-lora": [(1, "rtx4090-24gb", "single")],
    "qwen3-4b-thinking-lora": [(1, "h100-80gb", "single")],
    "qwen3-8b": [(4, "h100-80gb", "zero2"), (4, "h100-80gb", "zero3")],
    "qwen3-8b-lora": [(1, "a100-40gb", "single"), (2, "rtx4090-24gb", "zero3")],
    "qwen3-8b-qlora": [(1, "rtx4090-24gb", "single")],
    "smollm2-1.7b-lora": [(1, "rtx4090-24gb", "single")],
    "smollm3-3b": [(1, "h100-80gb", "single")],
    "smollm3-3b-tools-lora": [(1, "rtx4090-24gb", "single")],
}
IN_A_HEADER = re.compile(r"^(#   (\d+) x (.+?)  +(\w+) +)[\d.]+ to [\d.]+(?:, from formulas)?$", re.MULTILINE)


def job_of(recipe: str, count: int, gpu: str, strategy: str | None) -> Job:
    words = ["plan", f"recipes/{recipe}.yaml", "--gpus", str(count), "--gpu", gpu]
    if strategy is not None:
        words += ["--strategies", strategy]
    if strategy == "zero3_infinity":
        words += ["--nvme", "1000"]
    (job,), _ = requested(parse_arguments(words), []).jobs()
    return job


def row_of(job: Job, gpu: str, prediction: Prediction) -> dict:
    reserved = prediction.reserved_bytes
    return {
        "gpus": job.world_size,
        "gpu": gpu,
        "strategy": job.strategy,
        "micro_batch": f"{prediction.micro_batch_size} x {prediction.max_length:,} tokens",
        "low_bytes": reserved.low,
        "high_bytes": reserved.high,
        "source": prediction.source,
    }


def in_words(row: dict) -> str:
    """ "12.3 to 16.6, from formulas": of one GPU in GB."""
    source = "" if row["source"] == "engine" else ", from formulas"
    return f"{row['low_bytes'] / 1e9:.1f} to {row['high_bytes'] / 1e9:.1f}{source}"


def with_ranges(header: str, rows: list[dict]) -> str:
    """The recipe's text with the ranges of its rows, whose cards are named as "RTX 4090 24 GB" there."""
    known = {}
    for row in rows:
        known[row["gpus"], row["gpu"].replace("-", ""), row["strategy"]] = in_words(row)

    def renewed(found: re.Match) -> str:
        card = found[3].lower().replace(" ", "").replace("-", "")
        return found[1] + known[int(found[2]), card, found[4]]

    return IN_A_HEADER.sub(renewed, header)


def main(recipes: list[str]) -> None:
    """Plan the named recipes; all of them without names."""
    quieten()
    os.chdir(ROOT)
    predict = Predictor(seconds=SECONDS)
    jobs = []  # (recipe, gpu, job)
    for recipe in recipes or MACHINES:
        jobs += [(recipe, gpu, job_of(recipe, count, gpu, strategy)) for count, gpu, strategy in MACHINES[recipe]]
    predict.prepare([job for _, _, job in jobs], lambda job, left: print(f"{job.model} {job.strategy}, {left} left"))
    plans: dict[str, list[dict]] = {}
    for recipe, gpu, job in jobs:
        plans.setdefault(recipe, []).append(row_of(job, gpu, predict(job)))
    others = json.loads(RESULTS.read_text())["plans"] if recipes else {}
    in_order = dict(sorted((others | plans).items()))
    write_json(RESULTS, {"hardware": hardware_facts("cpu"), "versions": library_versions(), "plans": in_order})
    for recipe, rows in plans.items():
        path = ROOT / "recipes" / f"{recipe}.yaml"
        path.write_text(with_ranges(path.read_text(), rows))


if __name__ == "__main__":
    main(sys.argv[1:])
