"""Write docs/trust.md, how far each strategy is from what it must equal: python scripts/trust_table.py [--check]

Made from benchmarks/results/equivalence.json, resume.json and reshard.json alone, which the tests marked `grid` write.
With --check: exits 1 if the page differs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "trust.md"
STRATEGIES = ("ddp", "zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "fsdp2")
NOT_RESHARDED = ("ddp", "zero0", "fsdp2")
COLUMNS = {
    "loss": "largest relative difference of a step's loss from the reference's",
    "weight": "norm of the difference of all weights from the reference's, over the norm of the weights",
    "resume": "a run that is interrupted and resumed against one that is not, LoRA and full, bf16 and fp32: largest "
    "absolute difference of any loss, gradient norm, evaluation, weight, optimizer state or random number",
    "reshard": "a run whose checkpoint goes on under each other stage and world size (1, 2 and 4; offload to and from) "
    "against one that is not interrupted: largest relative difference of a step's loss, in fp32; weights and optimizer "
    "states are the same bits. Stage 0, ddp and FSDP2 are refused",
}
REFERENCE = (
    "The reference is a plain PyTorch loop in fp32 (`tests/helpers/equivalence_reference.py`): the token-weighted mean "
    "over the global batch, in one forward pass. Rows are of very uneven length, the loss is on the completion alone, "
    "gradients are clipped at 1.0, dropout is 0; an epoch ends within the run, with a step of fewer rows."
)


def deltas() -> dict[str, dict[str, float]]:
    """{column: {strategy: number}} of what has been measured."""
    resumed, resharded = _read("resume").get("strategies", {}), _read("reshard").get("pairs", [])
    apart: dict[str, float] = {}
    for pair in resharded:
        source, gap = pair["from"]["strategy"], pair["largest_relative_loss_difference"]
        apart[source] = max(apart.get(source, 0.0), gap)
    return _read("equivalence").get("deltas", {}) | {
        "resume": {strategy: max(_numbers(kinds)) for strategy, kinds in resumed.items()},
        "reshard": apart,
    }


def _read(name: str) -> dict:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _numbers(value) -> Iterator[float]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from _numbers(inner)
    else:
        yield value


def shown(value: float | None) -> str:
    """Zero is written as 0 only where it is zero."""
    if value is None:
        return "not measured"
    return "0" if value == 0 else f"{value:.1e}"


def page() -> str:
    measured = deltas()
    lines = ["# The stages agree", "", "Do all strategies train the same model? Each is held to a reference.", ""]
    lines += [REFERENCE, ""]
    grid = RESULTS / "equivalence.json"
    if grid.is_file():
        lines += [described(json.loads(grid.read_text())), ""]
    lines += ["| strategy | " + " | ".join(f"{column} delta" for column in COLUMNS) + " |"]
    lines += ["|---|" + "---:|" * len(COLUMNS)]
    for strategy in STRATEGIES:
        cells = [shown(measured.get(column, {}).get(strategy)) for column in COLUMNS]
        if strategy in NOT_RESHARDED:
            cells[-1] = "refused"
        lines += [f"| {strategy} | " + " | ".join(cells) + " |"]
    lines += ["", *(f"- {column} delta: {meaning}." for column, meaning in COLUMNS.items())]
    lines += [
        "",
        "A run killed ten times at seeded steps, inside saves too, equals the uninterrupted one "
        "(`tests/launch/test_kills.py`).",
        "",
        "All of it is fp32, but for the resumed runs in bf16. In bf16 DeepSpeed and FSDP2 add up the gradients of a "
        "step's micro batches and reduce them over the ranks in bf16, DDP in fp32 (`gradient_dtypes` in metrics.json; "
        'a ds_config with `"communication_data_type": "fp32"` and `"data_types": {"grad_accum_dtype": "fp32"}` makes '
        "DeepSpeed's stages 1 to 3 do as DDP does).",
        "",
        "Written by `python scripts/trust_table.py` from `benchmarks/results/*.json`.",
        "",
    ]
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
