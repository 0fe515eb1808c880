"""Score predictions.json against rows.yaml: python benchmarks/planners/score.py -> benchmarks/results/planners.json

Nothing is simulated: the predictions are what predict.py wrote down before. docs/plan.md cites the medians. `--blind`
scores the rows of blind/ -> benchmarks/results/blind.json
"""

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.planners import court  # noqa: E402
from benchmarks.planners.court import FOLDER, measured_bytes  # noqa: E402
from zero_recipes.core.files import write_json  # noqa: E402
from zero_recipes.plan.cost import constants, regime_of  # noqa: E402
from zero_recipes.plan.formulas import overheads  # noqa: E402

OURS = "this planner"
GOALS = {True: 0.03, False: 0.10}  # by `exact`
GROUPS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "configuration and reading exact": lambda row: row["exact"],
    "allocator, live tensors": lambda row: row["read"] == "allocated" and not row["exact"],
    "allocator, reserved": lambda row: row["read"] == "reserved",
    "reading not stated": lambda row: row["read"] in ("not stated", "nvidia-smi"),
    "one GPU, engine simulated": lambda row: row["gpus"] == 1 and row["found"]["source"] == "engine",
    "ZeRO on several GPUs, engine simulated": lambda row: row["gpus"] > 1 and row["found"]["source"] == "engine",
    "by formulas (FSDP, ZeRO++)": lambda row: row["found"]["source"] == "formulas",
    "full fine-tuning": lambda row: row["method"] == "full",
    "LoRA and QLoRA": lambda row: row["method"] != "full",
    "all rows": lambda row: True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blind", action="store_true", help="the rows of blind/")
    blind = parser.parse_args().blind
    folder = court.BLIND if blind else FOLDER
    predictions = json.loads((folder / "predictions.json").read_text())
    rows = scored(court.read_rows(folder / "rows.yaml"), predictions["rows"])
    times = scored_times(court.read_rows(folder / "times.yaml"), predictions["times"])
    parts = ["all", *sorted({row["part"] for row in times if "part" in row})]
    names = dict.fromkeys(name for row in rows for name in row["errors"])
    document = {
        "groups": {
            name: summary([row for row in rows if belongs(row)], OURS)
            for name, belongs in GROUPS.items()
            if any(belongs(row) for row in rows)
        },
        "planners": {name: summary([row for row in rows if name in row["errors"]], name) for name in names},
        "cached": cached(),
        "ranges": inside(rows),
        "rows": {row["id"]: {name: round(error, 4) for name, error in row["errors"].items()} for row in rows},
        "times": {
            "parts": {part: held([row for row in times if part in ("all", row.get("part"))]) for part in parts},
            "regimes": {
                name: held([row for row in times if row["regime"] == name])
                for name in sorted({r["regime"] for r in times})
            },
            "rows": {
                row["id"]: {
                    key: row[key] for key in ("regime", "seconds", "planned", "error", "left_out") if key in row
                }
                for row in times
            },
        },
    }
    write_json(ROOT / "benchmarks" / "results" / ("blind.json" if blind else "planners.json"), document)
    for name, found in (document["groups"] | document["planners"]).items():
        print(f"{name:40} {found['rows']:3} rows, median {found['median']:.1%}, worst {found['worst']:+.1%}")
    print(json.dumps(document["cached"] | document["ranges"]))
    held_now = {
        name: [found["held"], found["rows"], found.get("left_out")]
        for name, found in document["times"]["regimes"].items()
    }
    if not blind and constants()["holds"] != held_now:
        print(f"zero_recipes/plan/times.yaml: `holds` is of other predictions: {held_now}")
    if not blind and sorted({row["gpu"] for row in times}) != constants()["cards"]:
        print("zero_recipes/plan/times.yaml: `cards` are others")
    for name, found in (document["times"]["parts"] | document["times"]["regimes"]).items():
        counts = f"held {found['held']}, left out {found.get('left_out')}"
        print(f"times: {name:33} {found['rows']:3} rows, {counts}, median {found['median']:.1%}")


def scored_times(published: list[dict[str, Any]], predictions: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of times.yaml, with the geometric middle of the planned range over the measured seconds, less one."""
    rows = []
    for row in published:
        job, (low, high) = court.job_of_row(row), predictions[row["id"]]["step_seconds"]
        seconds = court.measured_seconds(row, job)
        found = {
            "seconds": round(seconds, 3),
            "planned": [low, high],
            "error": round((low * high) ** 0.5 / seconds - 1, 4),
        }
        left_out = predictions[row["id"]].get("left_out")
        if left_out is not None:
            found["left_out"] = left_out[0] <= seconds <= left_out[1]
        rows.append(row | found | {"regime": regime_of(job)})
    return rows


def held(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many measured seconds lie in the planned range, and in one that is fitted without the row's source."""
    worst = max(rows, key=lambda row: abs(row["error"]))
    left_out = {"left_out": sum(row["left_out"] for row in rows)} if "left_out" in rows[0] else {}
    return {
        "rows": len(rows),
        "held": sum(row["planned"][0] <= row["seconds"] <= row["planned"][1] for row in rows),
        "median": round(statistics.median(abs(row["error"]) for row in rows), 4),
        "worst": worst["error"],
        "worst_row": worst["id"],
    } | left_out


def scored(rows: list[dict[str, Any]], predictions: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows with a prediction, each with its errors by planner: predicted over measured, less one."""
    known = [row | {"found": predictions[row["id"]]} for row in rows if row["id"] in predictions]
    return [row | {"errors": errors(row)} for row in known if row["found"]["source"] != "none"]


def errors(row: dict[str, Any]) -> dict[str, float]:
    """Ours is of what was read: live tensors, with the cache of a card that is nearly full, or also with what is beside
    them where the source does not say."""
    found, read, measured = row["found"], row["read"], measured_bytes(row)
    ours = found["allocated"] * (1 if read == "allocated" else overheads().cached[0])
    ours += 0 if read in ("allocated", "reserved") else beside(found)
    others = {name: value for name, value in found["others"].items() if value is not None}
    return {name: value / measured - 1 for name, value in ({OURS: ours} | others).items()}


def beside(found: dict[str, Any]) -> int:
    """Bytes of CUDA and NCCL in a prediction."""
    return found["device"]["low"] - found["allocated"]


def inside(rows: list[dict[str, Any]]) -> dict[str, int]:
    """How many readings lie in the range that a plan prints; torch's own count has no CUDA and no NCCL in it."""
    read = [row for row in rows if row["read"] != "allocated"]
    ends = [
        [end - (beside(row["found"]) if row["read"] == "reserved" else 0) for end in row["found"]["device"].values()]
        for row in read
    ]
    held = [low <= measured_bytes(row) <= high for row, (low, high) in zip(read, ends, strict=True)]
    return {
        f"{name} inside range": f"{sum(h for h, row in zip(held, read, strict=True) if row['read'] in of)} of "
        f"{sum(row['read'] in of for row in read)}"
        for name, of in {"reserved": ("reserved",), "not stated": ("not stated", "nvidia-smi")}.items()
    }


def cached() -> dict[str, float]:
    """What cards show less CUDA and NCCL, over what was allocated: the quantiles of shown.csv, of overheads.yaml."""
    lines = [line for line in (FOLDER / "shown.csv").read_text().splitlines() if not line.startswith("#")]
    pairs = [(float(p["shown_mib"]), int(p["allocated_peak_bytes"]), int(p["gpus"])) for p in csv.DictReader(lines)]
    ratios = sorted((s * 2**20 - overheads().beside_segments(gpus)) / allocated for s, allocated, gpus in pairs)
    at = statistics.quantiles(ratios, n=20, method="inclusive")
    values = {"least": ratios[0], "10 %": at[1], "median": at[9], "90 %": at[17], "most": ratios[-1]}
    return {"pairs": len(ratios)} | {name: round(value, 3) for name, value in values.items()}


def summary(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """`ours`: the median of this planner on the same rows."""
    sizes = [abs(row["errors"][name]) for row in rows]
    worst = max(rows, key=lambda row: abs(row["errors"][name]))
    return {
        "rows": len(rows),
        "median": round(statistics.median(sizes), 4),
        "worst": round(worst["errors"][name], 4),
        "worst_row": worst["id"],
        "within_goal": sum(abs(row["errors"][name]) <= GOALS[row["exact"]] for row in rows),
        "ours": round(statistics.median(abs(row["errors"][OURS]) for row in rows), 4),
    }


if __name__ == "__main__":
    main()
