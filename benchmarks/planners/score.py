"""Scores predictions.json against rows.yaml and writes docs/planners.md: python benchmarks/planners/score.py [--check]

Nothing is simulated: the predictions are what predict.py wrote down. --check: exit code 1 where the page is another.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.planners import court  # noqa: E402
from benchmarks.planners.court import FOLDER, measured_bytes  # noqa: E402

PAGE = ROOT / "docs" / "planners.md"
OURS = "this planner"
GOALS = {True: 0.03, False: 0.10}  # by `exact`
GROUPS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "configuration and reading exact": lambda row: row["exact"],
    "allocator, live tensors": lambda row: row["read"] == "allocated" and not row["exact"],
    "allocator, reserved": lambda row: row["read"] == "reserved",
    "reading not stated": lambda row: row["read"] in ("not stated", "nvidia-smi"),
    "one GPU, engine simulated": lambda row: row["gpus"] == 1 and row["found"]["source"] == "engine",
    "ZeRO on several GPUs, engine simulated": lambda row: row["gpus"] > 1 and row["found"]["source"] == "engine",
    "by formulas (FSDP, ZeRO++, QLoRA)": lambda row: row["found"]["source"] == "formulas",
    "full fine-tuning": lambda row: row["method"] == "full",
    "LoRA and QLoRA": lambda row: row["method"] != "full",
    "all rows": lambda row: True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    rows = court.read_rows()
    known = scored(rows, json.loads((FOLDER / "predictions.json").read_text())["rows"])
    text = page(known, [row["id"] for row in rows if row["id"] not in {found["id"] for found in known}])
    if not parser.parse_args().check:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} is not what these predictions give: python benchmarks/planners/score.py")


def scored(rows: list[dict[str, Any]], predictions: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows with a prediction, each with its bytes and its errors by planner: predicted over measured, less one."""
    known = [row | {"found": predictions[row["id"]]} for row in rows if row["id"] in predictions]
    return [row | {"bytes": ours(row), "errors": errors(row)} for row in known if row["found"]["source"] != "none"]


def ours(row: dict[str, Any]) -> int:
    """What we predicted of what was read: live tensors, segments, or the whole process where nobody says which."""
    found, read = row["found"], row["read"]
    return found[read] if read in ("allocated", "reserved") else found["device"]["low"]


def errors(row: dict[str, Any]) -> dict[str, float]:
    measured = measured_bytes(row)
    others = {name: value for name, value in row["found"]["others"].items() if value is not None}
    return {name: value / measured - 1 for name, value in ({OURS: ours(row)} | others).items()}


def page(rows: list[dict[str, Any]], unanswered: list[str]) -> str:
    parts = [(FOLDER / "page_head.md").read_text().rstrip(), "## Error by group", _groups(rows)]
    parts += ["## Beside other planners", _planners(rows), "## Every row", _table(rows)]
    if unanswered:
        parts.append(f"{len(unanswered)} rows have no prediction yet (`predict.py`): {', '.join(unanswered)}.")
    parts += ["## Misses, explained", _misses(rows), (FOLDER / "page_foot.md").read_text().rstrip()]
    return "\n\n".join(parts) + "\n"


def _groups(rows: list[dict[str, Any]]) -> str:
    lines = ["| rows | n | median error | worst | within the goal |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, belongs in GROUPS.items():
        some = [row for row in rows if belongs(row)]
        if not some:
            continue
        sizes = [abs(row["errors"][OURS]) for row in some]
        worst = max(some, key=lambda row: abs(row["errors"][OURS]))
        within = sum(abs(row["errors"][OURS]) <= GOALS[row["exact"]] for row in some)
        median = _percent(statistics.median(sizes), sign=False)
        lines.append(
            f"| {name} | {len(some)} | {median} | {_percent(worst['errors'][OURS])} ({worst['id']}) "
            f"| {within} of {len(some)} |"
        )
    return "\n".join(lines)


def _planners(rows: list[dict[str, Any]]) -> str:
    lines = [
        "Median of the errors' sizes over the rows that the planner answers, ours over the same rows beside it.",
        "",
        "| planner | rows answered | median error | worst | ours on the same rows |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name in dict.fromkeys(name for row in rows for name in row["errors"]):
        some = [row for row in rows if name in row["errors"]]
        worst = max((row["errors"][name] for row in some), key=abs)
        medians = [statistics.median(abs(row["errors"][who]) for row in some) for who in (name, OURS)]
        theirs, own = (_percent(median, sign=False) for median in medians)
        lines.append(f"| {name} | {len(some)} | {theirs} | {_percent(worst)} | {own} |")
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]]) -> str:
    others = [name for name in dict.fromkeys(name for row in rows for name in row["errors"]) if name != OURS]
    head = ["row", "model", "strategy", "GPUs", "rows x tokens", "read", "measured", "ours", "error", *others]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * 6 + ['---:'] * (3 + len(others)))} |"]
    for row in rows:
        recipe = row["recipe"]
        cells = [row["id"], row["model"].split("/")[1], f"{row['method']}, {row['strategy']}", str(row["gpus"])]
        cells += [f"{recipe['per_device_train_batch_size']} x {recipe['max_length']}"]
        cells += ["exact, " + row["read"] if row["exact"] else row["read"]]
        mark = "" if row["found"]["source"] == "engine" else "*"
        cells += [_gb(measured_bytes(row)), _gb(row["bytes"]) + mark, _percent(row["errors"][OURS])]
        cells += [_percent(row["errors"][name]) if name in row["errors"] else "" for name in others]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Sizes in GB (10^9 bytes) a GPU. *: by formulas, the engine is not simulated there."]
    return "\n".join(lines)


def _misses(rows: list[dict[str, Any]]) -> str:
    reasons = yaml.safe_load((FOLDER / "misses.yaml").read_text())
    missed = [row for row in rows if abs(row["errors"][OURS]) > GOALS[row["exact"]]]
    lines = []
    for names, why in reasons.items():
        some = [row for row in missed if row["id"].startswith(tuple(names.split(", ")))]
        if some:
            which = ", ".join(f"{row['id']} ({_percent(row['errors'][OURS])})" for row in some)
            lines.append(f"- **{which}**: {why}")
            missed = [row for row in missed if row not in some]
    if missed:
        which = ", ".join(f"{row['id']} ({_percent(row['errors'][OURS])})" for row in missed)
        lines.append(f"- **Not explained yet**: {which}")
    return "\n".join(lines) or "None."


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}"


def _percent(error: float, sign: bool = True) -> str:
    return f"{100 * error:+.1f} %" if sign else f"{100 * error:.1f} %"


if __name__ == "__main__":
    main()
