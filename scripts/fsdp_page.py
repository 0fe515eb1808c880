"""Write the table of docs/fsdp.md: python scripts/fsdp_page.py [SWEEP | --check]

SWEEP: the folder of a sweep that `zero-recipes report` has read; its rows are kept in benchmarks/results/fsdp.json,
which alone makes the table:

    zero-recipes sweep recipes/tiny.yaml --strategies ddp,zero2,zero3,fsdp2 --max_steps 40 --eval_strategy no \
        --sample_prompts 0 --output_dir output/fsdp
    zero-recipes report output/fsdp && python scripts/fsdp_page.py output/fsdp

With --check: exits 1 if the page differs.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "fsdp.json"
PAGE = ROOT / "docs" / "fsdp.md"
KEPT = ("strategy", "status", "world_size", "device", "precision", "model", "parameters", "params_bytes", "grads_bytes",
        "optimizer_bytes", "state_bytes", "textbook_bytes", "communication_bytes", "communication_in_phi", "steps",
        "final_loss")  # fmt: skip


def keep(sweep: Path) -> None:
    """No times: the machine that measured was shared, and they would say nothing about GPUs."""
    rows = json.loads((sweep / "report.json").read_text())["rows"]
    versions = json.loads((sweep / "fsdp2" / "metrics.json").read_text())["versions"]
    document = {"rows": [{key: row[key] for key in KEPT} for row in rows], "versions": versions}
    RESULT.write_text(json.dumps(document, indent=2) + "\n")


def table() -> str:
    document = json.loads(RESULT.read_text())
    rows, versions = document["rows"], document["versions"]
    first = rows[0]
    lines = [
        f"{first['world_size']} processes ({first['device']}), {first['precision']}, {first['parameters']:,} "
        f"parameters, {first['steps']} steps; torch {versions['torch']}, accelerate {versions['accelerate']}, "
        f"DeepSpeed {versions['deepspeed']}. Bytes of model states on the rank that holds most.",
        "",
        "| strategy | params | grads | optimizer | model states | textbook | communication per step | final loss |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        sizes = (row[f"{part}_bytes"] for part in ("params", "grads", "optimizer", "state", "textbook"))
        cells = [row["strategy"], *(f"{size:,.0f}" for size in sizes)]
        cells += [f"{row['communication_in_phi']:.2f} Φ", f"{row['final_loss']:.4f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(["", *lines, "", ""])


def written(page: str) -> str:
    pattern = r"(<!-- table: begin[^\n]*-->\n).*?(<!-- table: end -->)"
    return re.sub(pattern, lambda found: found[1] + table() + found[2], page, flags=re.DOTALL)


def main(arguments: list[str]) -> int:
    if "--check" in arguments:
        return int(written(PAGE.read_text()) != PAGE.read_text())
    if arguments:
        keep(Path(arguments[0]))
    PAGE.write_text(written(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
