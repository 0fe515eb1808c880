"""Write the measured ratio beside each fast setting, in recipes/*.yaml and docs/fast.md: [--check]

From benchmarks/results/knobs.json (python -m benchmarks.knobs), host_overhead.json (python -m benchmarks.host_overhead)
and throughput.json (python -m benchmarks.throughput). --check: exits 1 if a line is another.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.throughput_page import GATHERS, ratio  # noqa: E402
from zero_recipes.core.tables import Column, markdown_columns  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "fast.md"
REFERENCE = "pythia.yaml"  # the settings of the comparison, fast or not
BETWEEN = re.compile(r"(<!-- begin: scripts/recipe_ratios\.py -->\n).*?(<!-- end -->)", re.S)
Rows = Sequence[Mapping[str, Any]]


def read() -> dict[str, dict[str, Any]]:
    names = ("knobs", "host_overhead", "throughput")
    return {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in names}


def ratios(rows: Rows, key: str, fast: Any, slow: Any, measure: Callable[[Mapping[str, Any]], float]) -> list[float]:
    """`measure` of each run with `fast` over that of the run that differs from it in `key` alone. Raises KeyError where
    there is none."""
    named = {(row["strategy"], json.dumps(row["swept"], sort_keys=True)): row for row in rows if not row["code"]}
    found = []
    for row in named.values():
        if row["swept"][key] == fast:
            other = json.dumps(row["swept"] | {key: slow}, sort_keys=True)
            found.append(measure(row) / measure(named[row["strategy"], other]))
    return found


def between(values: Sequence[float], digits: int = 2) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def percent(values: Sequence[float]) -> str:
    return between([100 * value for value in values], 0) + " %"


def speed(row: Mapping[str, Any]) -> float:
    """Real (non-padding) tokens a second."""
    return row["tokens_per_second"]


def measured(found: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """{setting: what it does alone, on CPUs}."""
    groups = {name: group["rows"] for name, group in found["knobs"]["groups"].items()}
    recomputing, sampling = "activation_checkpointing", "train_sampling_strategy"
    bucket, ahead = "zero_optimization.reduce_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"
    peak = [
        1 - share
        for share in ratios(
            groups["checkpointing"], recomputing, True, False, lambda row: row["simulated"]["allocated_peak_bytes"]
        )
    ]
    padding = {
        order: percent([1 - row["non_padding_share"] for row in rows])
        for order in ("random", "group_by_length")
        if (rows := [row for row in groups["group_by_length"] if row["swept"][sampling] == order])
    }
    saved = [
        stage["by_switching"][GATHERS]["wall_ms"] / stage["ms_per_step"]["token metrics as TRL"]["wall_ms"]
        for stage in found["host_overhead"]["stages"].values()
    ]
    grouped = between(ratios(groups["group_by_length"], sampling, "group_by_length", "random", speed))
    supervised = between(ratios(groups["supervised_logits"], "supervised_logits_only", True, False, speed))
    return {
        "supervised_logits_only": f"{supervised} times the tokens/s",
        "packing": between(ratios(groups["packing"], "packing", True, False, speed)) + " times the tokens/s",
        recomputing: between(ratios(groups["checkpointing"], recomputing, True, False, speed))
        + f" times the tokens/s, simulated peak memory {percent(peak)} less",
        sampling: f"{grouped} times the tokens/s, padding {padding['random']} -> {padding['group_by_length']}",
        "token_metrics": f"{percent(saved)} of a small step saved",
        "reduce_bucket_size": between(ratios(groups["reduce_bucket"], bucket, 5_000_000, 50_000, speed))
        + " times the tokens/s with 5e6 elements against 5e4",
        "stage3_prefetch_bucket_size": between(ratios(groups["prefetch"], ahead, 1_000_000, 0, speed))
        + " times the tokens/s with 1e6 elements against none",
    }


def comments(found: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """{a recipe's line: its comment}."""
    alone = measured(found)
    recomputing = alone["activation_checkpointing"]
    return {
        "packing: true": f"alone {alone['packing']}; all settings {ratio(found['throughput'])} (CPUs, docs/fast.md)",
        "supervised_logits_only: true": f"{alone['supervised_logits_only']} on CPUs; GPUs always do so (docs/knobs.md)",
        "activation_checkpointing: true": f"{recomputing} (CPUs)",
        "activation_checkpointing: false": f"true: {recomputing} (CPUs)",
        "train_sampling_strategy: group_by_length": f"{alone['train_sampling_strategy']} (CPUs)",
        "token_metrics: logging_steps": f"{alone['token_metrics']} (1M, CPUs; docs/throughput.md)",
        "attn_implementation: sdpa": "exact on every device; what flash attention gains is not measured: needs a GPU",
        "ddp_find_unused_parameters: false": "under ddp; else the Trainer looks for some in each step (not "
        "measured alone)",
    }


def with_comments(recipe: str, written: Mapping[str, str]) -> str:
    """The recipe with the comment behind each of these lines, whatever stands there."""
    for line, comment in written.items():
        recipe = re.sub(
            rf"^{re.escape(line)}(?: *#.*)?$", lambda _, new=f"{line}  # {comment}": new, recipe, flags=re.M
        )
    return recipe


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Of docs/fast.md: each setting alone."""
    on_gpus = "not measured: needs a GPU"
    rows = [*((f"`{name}`", text) for name, text in measured(found).items())]
    rows += [(f"`{name}`", on_gpus) for name in ("attn_implementation: flash_attention_2", "use_kernels", "tf32")]
    rows += [("all together, against `trl sft`", ratio(found["throughput"]).removesuffix(" trl sft") + " the tokens/s")]
    columns = [Column("setting", lambda row: row[0]), Column("measured on two CPU processes", lambda row: row[1])]
    return markdown_columns(columns, [], rows)


def pages(found: Mapping[str, Mapping[str, Any]]) -> dict[Path, str]:
    """{file: its text as it should be}."""
    recipes = (path for path in sorted((ROOT / "recipes").glob("*.yaml")) if path.name != REFERENCE)
    written = {path: with_comments(path.read_text(), comments(found)) for path in recipes}
    return written | {PAGE: BETWEEN.sub(lambda m: f"{m[1]}{table(found)}{m[2]}", PAGE.read_text())}


def main(arguments: list[str]) -> int:
    found = pages(read())
    if "--check" in arguments:
        return int(any(path.read_text() != text for path, text in found.items()))
    for path, text in found.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
