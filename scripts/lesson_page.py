"""Write the tables of docs/lesson.md from the formulas and from committed JSON: python scripts/lesson_page.py [--check]

--check: exits 1 if the page is another. The figures between the tables are held by tests/unit/test_lesson.py.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from zero_recipes.core.tables import Column, markdown_columns  # noqa: E402
from zero_recipes.core.units import size  # noqa: E402
from zero_recipes.theory.lower_bounds import resumable_bytes  # noqa: E402
from zero_recipes.theory.zero_paper import STAGES, communication_units, model_state_bytes  # noqa: E402

PAGE = ROOT / "docs" / "lesson.md"
RESULTS = ROOT / "benchmarks" / "results"
DEMO = ROOT / "docs" / "demo" / "report.json"
MODEL = "pythia-6.9b"
COMPONENTS = (  # section 3.1 of the ZeRO paper
    ("weight", "bf16", 2, "forward and backward compute with it"),
    ("gradient", "bf16", 2, "what backward finds"),
    ("master weight", "fp32", 4, "the exact weight, which the update changes"),
    ("momentum", "fp32", 4, "Adam: running mean of the gradient"),
    ("variance", "fp32", 4, "Adam: running mean of its square"),
)


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def parameters() -> int:
    return result("pythia_model_states")["models"][MODEL]["parameters"]


def table(names: Sequence[str], rows: Sequence[Sequence[Any]], left: int = 1) -> str:
    """The first `left` columns are words, the others numbers."""
    columns = [Column(name, lambda row, at=at: str(row[at])) for at, name in enumerate(names)]
    return markdown_columns(columns[:left], columns[left:], rows)


def components() -> str:
    psi = parameters()
    rows = [(name, dtype, why, each, size(each * psi)) for name, dtype, each, why in COMPONENTS]
    whole = sum(each for _, _, each, _ in COMPONENTS)
    rows.append(("**all**", "", "", whole, size(whole * psi)))
    return table(("what", "type", "what for", "bytes", "Pythia-6.9B"), rows, left=3)


def states() -> str:
    psi, worlds = parameters(), (1, 2, 8, 64)
    formulas = ("16Ψ", "4Ψ + 12Ψ/N", "2Ψ + 14Ψ/N", "16Ψ/N")
    rows = [
        (f"stage {stage}", formulas[stage], *(size(model_state_bytes(psi, world, stage).total) for world in worlds))
        for stage in STAGES
    ]
    return table(("", "formula", *(f"N = {world}" for world in worlds)), rows, left=2)


def deepspeed() -> str:
    found = result("pythia_model_states")["models"][MODEL]["strategies"]
    rows = []
    for stage in STAGES:
        strategy = found[f"zero{stage}"]
        copies = sum(b for part in strategy["deepspeed"].values() for term, b in part.items() if "inside step" in term)
        rows.append(
            (f"stage {stage}", size(strategy["textbook_bytes"]), size(copies), size(strategy["deepspeed_bytes"]))
        )
    return table(("", "paper", "of DeepSpeed's: fp32 copies inside the step", "DeepSpeed in all"), rows)


def volume() -> str:
    rows = [
        (
            row["what"],
            row["micro_steps"],
            ", ".join(name.replace("_", "-") for name, sent in row["bytes_by_collective"].items() if sent > 1000),
            f"{communication_units(int(row['what'].split()[1].rstrip(',')))}Φ",
            f"{row['measured_phi']:.2f}Φ",
        )
        for row in result("zero_family")["communication"]
    ]
    return table(("run", "micro batches", "collectives", "paper, one micro batch", "measured"), rows, left=3)


def measured() -> str:
    rows = [
        (
            row["strategy"],
            size(row["params_bytes"]),
            size(row["grads_bytes"]),
            size(row["optimizer_bytes"]),
            size(row["state_bytes"]),
            f"{row['communication_in_phi']:.2f}Φ",
            f"{row['step_seconds_median']:.3f} s",
            f"{row['final_loss']:.4f}",
        )
        for row in json.loads(DEMO.read_text())["rows"]
        if row["compared"]
    ]
    names = ("", "parameters", "gradients", "optimizer", "model states", "sent in a step", "step (CPU)", "final loss")
    return table(names, rows)


def offload() -> str:
    rows = []
    for strategy, run in result("zero_family")["offload"].items():
        held = max(run["model_state_bytes"], key=lambda rank: sum(rank.values()))
        device = sum(held[part] for part in ("params", "grads", "optimizer"))
        elsewhere = (size(held["offloaded_host"]), size(held["offloaded_disk"]))
        rows.append(
            (strategy, size(device), *elsewhere, f"{run['step_seconds']:.2f} s", f"{run['loss_history'][-1]:.3f}")
        )
    return table(("", "on the device", "in host memory", "on disk", "step (CPU)", "last loss"), rows)


def plus_plus() -> str:
    rows = [
        (
            strategy,
            f"{row['paper_phi']:g}Φ",
            f"{row['between_nodes_phi']:.2f}Φ",
            size(row["params_bytes"]),
        )
        for strategy, row in result("zero_family")["plus_plus"].items()
    ]
    return table(("", "between machines, paper", "measured", "parameters on a rank"), rows)


def fsdp() -> str:
    rows = [
        (
            row["strategy"],
            size(row["params_bytes"]),
            size(row["grads_bytes"]),
            size(row["optimizer_bytes"]),
            size(row["state_bytes"]),
            f"{row['final_loss']:.4f}",
        )
        for row in result("fsdp")["rows"]
        if row["strategy"] in ("zero3", "fsdp2")
    ]
    return table(("", "parameters", "gradients", "optimizer", "model states", "final loss"), rows)


def checkpoints() -> str:
    psi = parameters()
    rows = [("the model, 16 bits", "2Ψ", size(2 * psi))]
    for stage, formula in ((2, "16Ψ"), (3, "14Ψ")):
        rows.append((f"to go on from, stage {stage}", formula, size(resumable_bytes(2 * psi, 12 * psi, stage))))
    return table(("checkpoint", "formula", "Pythia-6.9B"), rows, left=2)


PARTS: tuple[Callable[[], str], ...] = (
    components, states, deepspeed, volume, measured, offload, plus_plus, fsdp, checkpoints,
)  # fmt: skip


def written() -> str:
    text = PAGE.read_text()
    for part in PARTS:
        begin = f"<!-- {part.__name__}: begin (scripts/lesson_page.py) -->\n"
        end = f"<!-- {part.__name__}: end -->"
        between = f"{begin}\n{part().strip()}\n\n{end}"
        text, found = re.subn(f"{re.escape(begin)}.*?{end}", lambda _, new=between: new, text, flags=re.S)
        assert found == 1, part.__name__
    return text


def main(arguments: list[str]) -> int:
    text = written()
    if "--check" in arguments:
        return int(PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
