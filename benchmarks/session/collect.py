"""The rows of a session as committed results, and the constants of the plan that they give."""

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.throughput import together, tokens_per_second
from zero_recipes.core.files import write_json

RESULTS = Path(__file__).resolve().parents[1] / "results"
NAMES = {1: "tiny", 2: "plan", 3: "speed", 4: "offload", 5: "fp16", 6: "throughput"}
Row = dict[str, Any]


def collect(folder: Path, results: Path) -> list[str]:
    """Write results/gpu_*.json from all partN.jsonl below `folder`; lines that say what was written."""
    rows, lines = read_rows(folder), []
    for part, name in NAMES.items():
        own = [row | {"derived": derived(row) if row["status"] == "ok" else {}} for row in rows if row["part"] == part]
        if own:
            write_json(results / f"gpu_{name}.json", {"rows": own})  # each row's metrics name its machine
            lines.append(f"{results}/gpu_{name}.json: {len(own)} rows")
    return [*lines, f"zero_recipes/plan/overheads.yaml: {constants(rows)}"]


def read_rows(folder: Path) -> list[Row]:
    """The row of each case that counts: the latest, unless an earlier one is ok and the later is not."""
    found: dict[str, Row] = {}
    for path in sorted(folder.rglob("part*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the machine went away while it was written
            if found.get(row["case"], {}).get("status") != "ok" or row["status"] == "ok":
                found[row["case"]] = row
    return list(found.values())


def derived(row: Row) -> Row:
    """Part 2: planned over measured, of both peaks. Part 6: tokens/s and held-out loss by program, and the recipe's
    speed over the others'. What CUDA itself held when training ended."""
    if row["part"] == 6:
        good = {name: each for name, each in row["beside"]["programs"].items() if "error" not in each}
        speeds = {name: tokens_per_second(together([each], each["accumulation"])) for name, each in good.items()}
        ratios = {f"recipe/{name}": speeds["recipe"] / speed for name, speed in speeds.items() if name != "recipe"}
        losses = {name: each["held_out_loss"] for name, each in good.items()}
        return {"tokens_per_second": speeds, "held_out_loss": losses} | ratios
    card, plan, (peak, *_) = row["beside"], row["planned"], row["metrics"]["peak_memory_bytes"]
    found = {"context_bytes": card["total_bytes"] - card["free_bytes"] - card["reserved_now_bytes"]}
    if row["part"] == 2:
        within = plan["reserved_bytes"]["low"] <= peak["reserved"] <= plan["reserved_bytes"]["high"]
        found |= {"allocated_ratio": plan["allocated_peak_bytes"] / peak["allocated"], "within_reserved_range": within}
    return found


def constants(rows: list[Row]) -> Row:
    """{"context": median bytes, "cached": the least and the largest reserved peak over the allocated one}."""
    good = [row for row in rows if row["status"] == "ok" and row["part"] != 6]
    peaks = [row["metrics"]["peak_memory_bytes"][0] for row in good]
    ratios = [peak["reserved"] / peak["allocated"] for peak in peaks]
    return {"context": statistics.median(derived(row)["context_bytes"] for row in good),
            "cached": [round(min(ratios), 4), round(max(ratios), 4)]}  # fmt: skip
