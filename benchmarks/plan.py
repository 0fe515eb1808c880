"""Time and memory that planning takes: python benchmarks/plan.py -> benchmarks/results/plan.json

recipes/pythia.yaml under every strategy on 2 GPUs, side by side as `zero-recipes plan` does, Pythia-410M on one GPU,
and a Llama of 70 billion parameters on 64 GPUs under stage 3. Nothing is taken from the cache of predictions, or left
there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.chdir(ROOT)

from zero_recipes.core import environment  # noqa: E402
from zero_recipes.core.files import write_json  # noqa: E402
from zero_recipes.plan import jobs as plan_jobs  # noqa: E402
from zero_recipes.plan.simulator import parent as simulation  # noqa: E402

RECIPE = Path("recipes/pythia.yaml")
JOBS = {
    "pythia-6.9b, every strategy, 2 GPUs": ("EleutherAI/pythia-6.9b-deduped", plan_jobs.ALL, 2),
    "pythia-410m, every strategy, 1 GPU": ("EleutherAI/pythia-410m-deduped", plan_jobs.ALL, 1),
    "llama-2-70b, zero3, 64 GPUs": ("meta-llama/Llama-2-70b-hf", ("zero3",), 64),
}


def main() -> None:
    measured = {}
    for name, (model, strategies, count) in JOBS.items():
        recipe = plan_jobs.read_recipe(RECIPE, ["--model_name_or_path", model])
        known = plan_jobs.read_strategies(recipe, strategies)
        config = plan_jobs.model_config(recipe.settings)
        jobs = [plan_jobs.job_of(recipe, config, strategy, ds, count) for strategy, ds in known.items()]
        begin = time.perf_counter()
        predictions = simulation.simulate(jobs)
        seconds = time.perf_counter() - begin
        measured[name] = {
            "seconds": round(seconds, 1),
            "strategies": {
                found.strategy: {
                    "seconds": round(found.seconds, 1),
                    "resident_bytes": found.resident_bytes,
                    "allocated_peak_bytes": found.allocated_peak_bytes,
                }
                for found in predictions
            },
        }
        print(name, measured[name], flush=True)
        hardware = environment.hardware("cpu") | {"cores": os.cpu_count(), "load_average": os.getloadavg()[1]}
        document = {"measured": measured, "hardware": hardware, "versions": environment.versions()}
        write_json(ROOT / "benchmarks" / "results" / "plan.json", document)  # after each: the second takes long


if __name__ == "__main__":
    main()
