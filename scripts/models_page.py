"""docs/models.md from benchmarks/results/families.json and benchmarks/families.yaml: the board of model types."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "families.json"
DATA = ROOT / "benchmarks" / "families.yaml"
COLUMNS = {
    "one": "one process",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "fsdp2": "FSDP2",
    "lora": "LoRA",
    "packed": "packed",
    "recomputed": "recomputed",
    "bf16": "bf16",
    "saved": "saved",
    "resumed": "resumed",
}
PAGE = """# Models

Types of causal models that transformers {transformers} knows, {types} of {known}, made small with random weights and
trained by `run_sft.py`'s own code on CPUs ({date}). The board shows that the results are right, and nothing about
speed: kernels for GPUs do not run. A row says that a type's code trains. The real model needs memory ([plan](plan.md)),
and may have a tokenizer or a template with traps of its own (`zero-recipes check --data`).

Of {cells} cells, **{equal} are equal**, {refused} are refused before weights are loaded, and {fails} fail.
{unsupported} types cannot be built here. {whole} types are equal in every cell.

- **One process** trains in fp32. Each step takes all rows, so that every other run must have its losses.
- **ZeRO-2**, **ZeRO-3** and **FSDP2** train on two processes, **LoRA** on all linear layers under ZeRO-3 (compared with
  LoRA in one process), **recomputed** under ZeRO-3 with activation checkpointing. **Packed** trains all rows as one
  pack: the losses are those of the separate rows. A cell is the largest relative difference of a loss; the limit is
  {limit:g}. Routers have no balancing loss, which is one of a micro batch by its definition.
- **bf16** trains under ZeRO-2, and its losses differ by less than {bf16:.0%} from those in fp32.
- **Saved** loads what ZeRO-3 has saved with transformers alone, and compares logits. **Resumed** goes on from a
  checkpoint of ZeRO-3.
- A code is a refusal. **fails** is explained [below](#cells-that-fail). An empty cell was not run, because the run that
  it is compared with has no losses.

Sizes come from the model's own configuration where zero-recipes has it, else from the defaults of the class
(`from` and `small` in `benchmarks/results/families.json`). `python -m benchmarks.families TYPE` repeats a row.

"""


def models_page() -> str:
    """The whole page."""
    document = json.loads(RESULTS.read_text())
    data = yaml.safe_load(DATA.read_text())
    rows = document["types"]
    built = {kind: row for kind, row in rows.items() if "cells" in row}
    counts = Counter(cell["result"] for row in built.values() for cell in row["cells"].values())
    whole = [kind for kind, row in built.items() if all(cell["result"] == "equal" for cell in row["cells"].values())]
    page = [
        PAGE.format(
            transformers=document["versions"]["transformers"],
            types=len(rows),
            known=document["known"],
            date=max(row["date"] for row in rows.values()),
            cells=counts.total() - counts["not run"],
            equal=counts["equal"],
            refused=counts["refused"],
            fails=counts["fails"],
            unsupported=len(rows) - len(built),
            whole=len(whole),
            limit=document["limits"]["losses"],
            bf16=document["limits"]["bf16"],
        )
    ]
    page += [f"| type | example | {' | '.join(COLUMNS.values())} | to know |\n"]
    page += [f"| --- | --- |{' --- |' * len(COLUMNS)} --- |\n"]
    for kind, row in built.items():
        known = data["types"].get(kind, {})
        cells = [in_words(row["cells"][name]) for name in COLUMNS]
        page.append(f"| `{kind}` | {known.get('example', '')} | {' | '.join(cells)} | {known.get('know', '')} |\n")
    page += ["\n## Cells that fail\n\n", *failing(built, data["explained"])]
    page += ["\n## Not built\n\n"]
    page += [not_built(kind, row["unsupported"], data["explained"]) for kind, row in rows.items() if kind not in built]
    return "".join(page)


def not_built(kind: str, error: str, explained: list[dict[str, Any]]) -> str:
    """A line for a type without cells: what its class raises, and what is known of it."""
    return f"- `{kind}`: {code(error)}{explanation('built', error, explained)}\n"


def in_words(cell: dict[str, Any]) -> str:
    """A cell of the table."""
    if cell["result"] == "equal":
        return written(cell["gap"]) if "gap" in cell else "trains"
    if cell["result"] == "refused":
        return " ".join(f"[{name}](codes.md#{name.lower()})" for name in dict.fromkeys(cell["codes"]))
    return "**fails**" if cell["result"] == "fails" else ""


def written(gap: float) -> str:
    """A difference: 7e-08, or 0."""
    return f"{gap:.0e}" if gap else "0"


def failing(rows: dict[str, Any], explained: list[dict[str, Any]]) -> list[str]:
    """A line for each error, with the cells that have it and what is known of it."""
    cells_by_error: dict[tuple[str, str], list[str]] = {}
    for kind, row in rows.items():
        by_error: dict[str, list[str]] = {}
        for name, cell in row["cells"].items():
            if cell["result"] == "fails":
                by_error.setdefault(cell["error"], []).append(name)
        for error, names in by_error.items():
            why = explanation(names[0], error, explained)
            places = f"`{kind}` ({', '.join(COLUMNS[name] for name in names)})"
            cells_by_error.setdefault((error if not why else "", why), []).append(places)
    lines = []
    for (error, why), places in cells_by_error.items():
        lines.append(f"- {', '.join(places)}: {code(error) if error else why.removeprefix('. ')}\n")
    return lines or ["None.\n"]


def explanation(cell: str, error: str, explained: list[dict[str, Any]]) -> str:
    """What is known of an error, as a sentence that follows it; empty where nothing is."""
    for entry in explained:
        if cell in entry.get("cells", [cell]) and re.search(entry["error"], error):
            link = f" ([{entry['issue']}]({address(entry['issue'])}))" if "issue" in entry else ""
            return f". {entry['why'].strip()}{link}"
    return ""


def address(issue: str) -> str:
    """Of an issue: huggingface/transformers#123."""
    repository, _, number = issue.partition("#")
    return f"https://github.com/{repository}/issues/{number}"


def code(text: str) -> str:
    """A library's words, as code."""
    return f"`{text.replace('`', chr(39)).replace('|', '/')}`"
