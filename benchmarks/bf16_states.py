"""What bf16 states and torch_autocast cost in quality: python -m benchmarks.bf16_states [--seeds N ...] [--rates R ...]

The demo (recipes/tiny.yaml, 120 steps, its held-out questions) under each strategy, with several seeds, one run after
another through one pair of processes; and the plain and bf16-state stages at smaller learning rates, where more updates
are too small for a bf16 weight. Writes benchmarks/results/bf16_states.json, from which scripts/precision_page.py makes
the table of docs/precision.md. A seed takes about two minutes on two cores; runs of other seeds and rates stay.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tests.helpers.group import Group
from zero_recipes.core import environment
from zero_recipes.core.files import write_json
from zero_recipes.libs.warnings import quieten
from zero_recipes.metrics.read_runs import read_runs

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "bf16_states.json"
RECIPE = "recipes/tiny.yaml"
STEPS = 120
OWN_RATE = 5e-4  # the recipe's
STRATEGIES = ("ddp", "zero2", "zero2_bf16_states", "zero3", "zero3_bf16_states", "zero2_autocast")
PAIR = ("zero2", "zero2_bf16_states")  # at the other learning rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rates", nargs="+", type=float, default=[OWN_RATE, 1e-4, 2e-5])
    given = parser.parse_args()
    quieten()
    os.chdir(ROOT)
    rows = json.loads(RESULT.read_text())["runs"] if RESULT.is_file() else []
    two = Group(2)
    try:
        for rate in given.rates:
            for seed in given.seeds:
                for strategy in STRATEGIES if rate == OWN_RATE else PAIR:
                    row = run(two, strategy, rate, seed)
                    rows = [old for old in rows if identity(old) != identity(row)] + [row]
                    write(rows)
                    said = {key: row[key] for key in ("final_loss", "eval_losses", "exact_match", "token_f1")}
                    print(*identity(row), said, flush=True)
    finally:
        two.close()


def identity(row: dict[str, Any]) -> tuple[str, float, int]:
    return row["strategy"], row["learning_rate"], row["seed"]


def run(group: Group, strategy: str, rate: float, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bf16-states-") as folder:
        argv = [RECIPE, "--output_dir", folder, "--overwrite", "true", "--save_model", "false"]
        argv += ["--max_steps", str(STEPS), "--seed", str(seed), "--learning_rate", str(rate)]
        argv += [] if strategy == "ddp" else ["--deepspeed", f"ds_configs/{strategy}.json"]
        argv += ["--bf16", "false"] if strategy == "zero2_autocast" else []
        group.run("train", argv=argv)
        (found,) = read_runs(Path(folder))
    after = [sample.scores_after for sample in found.samples]
    return {
        "strategy": strategy,
        "learning_rate": rate,
        "seed": seed,
        "steps": len(found.loss_history),
        "precision": found.precision,
        "first_loss": found.loss_history[0],
        "final_loss": statistics.mean(found.loss_history[-10:]),  # of the last ten steps
        "eval_losses": [evaluation.loss for evaluation in found.eval_history],
        "questions": len(after),
        "exact_match": statistics.mean(scores["exact_match"] for scores in after),
        "token_f1": statistics.mean(scores["token_f1"] for scores in after),
        "reference_loss": statistics.mean(scores["reference_loss"] for scores in after),
        "model_state_bytes": max(held.params + held.grads + held.optimizer for held in found.model_state_bytes),
        "parameters": found.parameters,
    }


def write(rows: list[dict[str, Any]]) -> None:
    """After each run: what has been measured is not lost with the rest."""
    rows.sort(key=lambda row: (-row["learning_rate"], row["seed"], STRATEGIES.index(row["strategy"])))
    write_json(
        RESULT,
        {
            "command": "python -m benchmarks.bf16_states",
            "recipe": RECIPE,
            "processes": 2,
            "runs": rows,
            "hardware": environment.hardware("cpu"),
            "versions": environment.versions(),
        },
    )


if __name__ == "__main__":
    main()
