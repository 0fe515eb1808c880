"""The rows of a session as committed results, and the constants of the plan that they give."""

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.session.cases import PARTS
from benchmarks.throughput import together, tokens_per_second
from zero_recipes.core.files import write_json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NAMES = {1: "tiny", 2: "plan", 3: "speed", 4: "offload", 5: "fp16", 6: "throughput"}
Row = dict[str, Any]


def collect(folder: Path, results: Path) -> list[str]:
    """Write results/gpu_*.json from all partN.jsonl below `folder`; lines that say what was written.

    Raises ValueError where there are no rows.
    """
    rows = read_rows(folder)
    if not rows:
        raise ValueError(f"no partN.jsonl with rows below {folder}")
    lines = []
    for part, name in NAMES.items():
        own = [row for row in rows if row["part"] == part]
        if own:
            write_json(results / f"gpu_{name}.json", document(part, own))
            lines.append(f"{results}/gpu_{name}.json: {len(own)} rows")
    return [*lines, *(f"zero_recipes/plan/overheads.yaml, {name}: {value}" for name, value in constants(rows).items())]


def read_rows(folder: Path) -> list[Row]:
    """The row of each case that counts: the latest, unless an earlier one is ok and the later is not."""
    found: dict[tuple, Row] = {}
    for path in sorted(folder.rglob("part*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the machine went away while it was written
            before = found.get((row["part"], row["case"]))
            if before is None or before.get("status") != "ok" or row.get("status") == "ok":
                found[row["part"], row["case"]] = row
    return list(found.values())


def document(part: int, rows: list[Row]) -> Row:
    """One results file: the rows, and what follows from them; each row's metrics name its machine."""
    derive = {2: against_plan, 6: side_by_side}.get(part, lambda row: {})
    measured = [row | {"derived": derive(row) if row.get("status") == "ok" else {}} for row in rows]
    return {"part": PARTS[part], "rows": measured}


def against_plan(row: Row) -> Row:
    """Planned over measured, of both peaks, and what the card held beside torch's allocator."""
    peak, plan = row["metrics"]["peak_memory_bytes"][0], row["planned"]
    if peak["allocated"] is None or plan is None:
        return {}
    return {
        "allocated_ratio": plan["allocated_peak_bytes"] / peak["allocated"],
        "within_reserved_range": plan["reserved_bytes"]["low"] <= peak["reserved"] <= plan["reserved_bytes"]["high"],
    } | beside_allocator(row)


def beside_allocator(row: Row) -> Row:
    """{"context_bytes"}: what CUDA itself held when training ended."""
    card = row.get("beside") or {}
    if "free_bytes" not in card:
        return {}
    return {"context_bytes": card["total_bytes"] - card["free_bytes"] - card["reserved_now_bytes"]}


def side_by_side(row: Row) -> Row:
    """Tokens/s and held-out loss by program, and the recipe's speed over the others'."""
    good = {name: each for name, each in row["beside"]["programs"].items() if "error" not in each}
    speeds = {name: tokens_per_second(together([each], each["accumulation"])) for name, each in good.items()}
    ratios = {f"recipe/{name}": speeds["recipe"] / speeds[name] for name in ("trl", "engine") if name in speeds}
    losses = {name: each["held_out_loss"] for name, each in good.items()}
    return {"tokens_per_second": speeds, "held_out_loss": losses} | ratios


def constants(rows: list[Row]) -> Row:
    """{"context": bytes, "cached": [low, high]} as far as the rows tell.

    context: the median. cached: the least and the largest reserved peak over the allocated one.
    """
    good = [row for row in rows if row.get("status") == "ok"]
    contexts = [found["context_bytes"] for found in map(beside_allocator, good) if found]
    peaks = [row["metrics"]["peak_memory_bytes"][0] for row in good]
    ratios = [peak["reserved"] / peak["allocated"] for peak in peaks if peak["reserved"] and peak["allocated"]]
    fitted = {"context": int(statistics.median(contexts))} if contexts else {}
    return fitted | ({"cached": [round(min(ratios), 4), round(max(ratios), 4)]} if ratios else {})
