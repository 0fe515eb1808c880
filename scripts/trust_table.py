"""Write docs/trust.md, how far each strategy is from what it must equal: python scripts/trust_table.py [--check]

Made from benchmarks/results/*.json alone: every file there with "deltas": {column: {strategy: number}} gives its
columns. With --check: exits 1 if the page differs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "trust.md"
STRATEGIES = ("ddp", "zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
COLUMNS = {
    "loss": "largest relative difference of a step's loss from the reference's",
    "weight": "norm of the difference of all weights from the reference's, over the norm of the weights",
    "resume": "the same of a run stopped and resumed from one that was not",
    "reshard": "the same of a checkpoint's states after they went to another world size or stage",
}
REFERENCE = (
    "The reference is a plain PyTorch loop in fp32 (`tests/equivalence/reference.py`): the token-weighted mean over "
    "the global batch, in one forward pass. Rows are of very uneven length, the loss is on the completion alone, "
    "gradients are clipped at 1.0, dropout is 0; an epoch ends within the run, with a step of fewer rows."
)


def deltas() -> dict[str, dict[str, float]]:
    """{column: {strategy: number}}, joined over all files that have some."""
    joined: dict[str, dict[str, float]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        joined |= json.loads(path.read_text()).get("deltas", {})
    return joined


def shown(value: float | None) -> str:
    """Zero is written as 0 only where it is zero."""
    if value is None:
        return "not measured"
    return "0" if value == 0 else f"{value:.1e}"


def page() -> str:
    measured = deltas()
    lines = ["# The stages agree", "", REFERENCE, ""]
    grid = RESULTS / "equivalence.json"
    if grid.is_file():
        lines += [described(json.loads(grid.read_text())), ""]
    lines += ["| strategy | " + " | ".join(f"{column} delta" for column in COLUMNS) + " |"]
    lines += ["|---|" + "---:|" * len(COLUMNS)]
    for strategy in STRATEGIES:
        cells = [shown(measured.get(column, {}).get(strategy)) for column in COLUMNS]
        lines += [f"| {strategy} | " + " | ".join(cells) + " |"]
    lines += ["", *(f"- {column} delta: {meaning}." for column, meaning in COLUMNS.items())]
    lines += ["", "Written by `python scripts/trust_table.py` from `benchmarks/results/*.json`.", ""]
    return "\n".join(lines)


def described(grid: dict) -> str:
    """What was run, on what, and which tensors stand further apart."""
    worlds, steps = (sorted({run[key] for run in grid["runs"]}) for key in ("world_size", "accumulation"))
    apart = [value for run in grid["runs"] for value in run["tensors_further_apart"].values()]
    names = ", ".join(f"`{name}`" for name in grid["tensors_without_gradient"])
    return (
        f"{len(grid['runs'])} runs: each strategy at world sizes {joined(worlds)} and accumulations {joined(steps)}, "
        f"always {grid['examples_per_step']} examples per optimizer step, {grid['steps']} steps; the largest of each "
        f"is shown, {grid['tolerance']:.0e} is allowed. {grid['hardware']['cpu']}, {grid['hardware']['cpu_cores']} "
        f"cores, no GPU; torch {grid['versions']['torch']}, DeepSpeed {grid['versions']['deepspeed']}.\n\n"
        f"Single tensors are as close, but for {names}: up to {max(apart, default=0):.1e}. The biases of keys that no "
        "rotary embedding turns have no true gradient; Adam scales its rounding up (a test shows that it is rounding)."
    )


def joined(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"


def main(arguments: list[str]) -> int:
    if "--check" in arguments:
        return int(not PAGE.is_file() or PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
