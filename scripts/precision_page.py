"""Write the measured part of docs/precision.md from committed JSON: python scripts/precision_page.py [--check]

benchmarks/results/bf16_states.json is written by python -m benchmarks.bf16_states. --check: exits 1 if the page is
another.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from zero_recipes.core.tables import Column, markdown_columns  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "bf16_states.json"
PAGE = ROOT / "docs" / "precision.md"
Row = dict[str, Any]
SPREAD = "the mean, in brackets the smallest and the largest."
COLUMNS = [
    Column("strategy", lambda row: row["strategy"]),
    Column("learning rate", lambda row: f"{row['learning_rate']:g}"),
    Column("bytes on a rank", lambda row: f"{row['bytes']:.2f} a parameter"),
    Column("loss of the last 10 steps", lambda row: _spread(row["final_loss"], "{:.4f}")),
    Column("loss on held-out rows", lambda row: _spread(row["held_out"], "{:.4f}")),
    Column("against fp32 masters", lambda row: row["against"]),
    Column("of their learning, kept", lambda row: row["kept"]),
    Column("held-out questions right", lambda row: _spread(row["exact_match"], "{:.0%}")),
]


def baseline(strategy: str) -> str:
    return strategy.removesuffix("_bf16_states") if strategy.endswith("_bf16_states") else "zero2"


def fall(run: Row) -> float:
    """By how much the training loss has fallen, from the first step to the mean of the last ten."""
    return run["first_loss"] - run["final_loss"]


def table(runs: list[Row]) -> list[Row]:
    """One row for each strategy and learning rate: what its seeds gave, in the order of the seeds."""
    found: dict[tuple[float, str], list[Row]] = {}
    for run in runs:
        found.setdefault((run["learning_rate"], run["strategy"]), []).append(run)
    rows = []
    for (rate, strategy), seeds in found.items():
        held_out = [run["eval_losses"][-1] for run in seeds]
        row = {
            "strategy": strategy,
            "learning_rate": rate,
            "bytes": seeds[0]["model_state_bytes"] / seeds[0]["parameters"],
            "final_loss": [run["final_loss"] for run in seeds],
            "held_out": held_out,
            "exact_match": [run["exact_match"] for run in seeds],
            "against": "-",
            "kept": "-",
        }
        if strategy not in ("ddp", "zero2", "zero3"):
            pairs = list(zip(seeds, found[rate, baseline(strategy)], strict=True))
            row["against"] = _spread([a["eval_losses"][-1] / b["eval_losses"][-1] - 1 for a, b in pairs], "{:+.1%}")
            row["kept"] = _spread([fall(a) / fall(b) for a, b in pairs], "{:.0%}")
        rows.append(row)
    return rows


def written(page: str, document: dict[str, Any]) -> str:
    runs = document["runs"]
    seeds = len({run["seed"] for run in runs})
    before = f"{runs[0]['steps']} steps of {document['recipe']} ({runs[0]['parameters']:,} parameters) on"
    machine = ", ".join(f"{name} {document['versions'][name]}" for name in ("torch", "deepspeed", "transformers"))
    said = textwrap.fill(f"{before} {document['processes']} CPU processes, {seeds} seeds: {SPREAD}", 120)
    columns = markdown_columns(COLUMNS[:2], COLUMNS[2:], table(runs))
    body = f"{said}\n\n{columns}\n{document['hardware']['cpu']}; {machine}. `{document['command']}`\n"
    return re.sub(r"(<!-- begin[^\n]*-->\n).*?(<!-- end -->)", lambda m: f"{m[1]}\n{body}\n{m[2]}", page, flags=re.S)


def _spread(values: list[float], form: str) -> str:
    mean, low, high = (form.format(value) for value in (statistics.mean(values), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def main(arguments: list[str]) -> int:
    page = PAGE.read_text()
    made = written(page, json.loads(RESULT.read_text()))
    if "--check" in arguments:
        return int(made != page)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
