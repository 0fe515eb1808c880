"""Write the tables of docs/zero_family.md from committed JSON: python scripts/zero_family_page.py [--check]

benchmarks/results/zero_family.json is written by python -m benchmarks.zero_family, sweep_all.json is the report.json of
zero-recipes sweep recipes/tiny.yaml --strategies all --max_steps 20, sweep_four.json that of the same with
--num_processes 4 --per_device_train_batch_size 4 --sample_prompts 0. --check: exits 1 if the page is another.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from zero_recipes.core import units  # noqa: E402
from zero_recipes.report import table  # noqa: E402

PAGE = ROOT / "docs" / "zero_family.md"
RESULTS = ROOT / "benchmarks" / "results"


def markdown(headers: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    headers = list(headers)
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def sweep_part() -> str:
    parts = []
    for name, where in (("sweep_all", "Two processes"), ("sweep_four", "Four processes of one machine")):
        rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        ran = [row for row in rows if row["status"] == "ok"]
        others = ", ".join(f"{row['label']} ({row['status']})" for row in rows if row["status"] != "ok")
        (ddp,) = (row["final_loss"] for row in ran if row["strategy"] == "ddp")
        gap = max(abs(row["final_loss"] - ddp) / ddp for row in ran)
        parts.append(
            f"{where}:\n\n{table.markdown_table(ran)}\nThe final losses lie within {gap:.2%} of ddp's, in bf16. "
            f"Not run, each with its reason: {others}.\n"
        )
    return "\n".join(parts)


def communication_part(found: dict) -> str:
    rows = [
        (
            row["what"],
            row["micro_steps"],
            f"{row['measured_phi']:.2f}",
            f"{row['source_phi']:g}",
            row["source"],
            row["paper_phi"],
            f"{row['step_seconds']:.3f} s",
        )
        for row in found["communication"]
    ]
    return markdown(("run", "micro steps", "measured Φ", "source Φ", "which is", "paper Φ", "step (CPU)"), rows)


def offload_part(found: dict) -> str:
    rows = []
    for name, run in found["offload"].items():
        rank = max(run["model_state_bytes"], key=lambda r: r["params"] + r["grads"] + r["optimizer"])
        here = rank["params"] + rank["grads"] + rank["optimizer"]
        sizes = [units.size(size) for size in (here, rank["offloaded_host"], rank["offloaded_disk"])]
        rows.append((name, *sizes, f"{run['step_seconds']:.2f} s", f"{run['loss_history'][-1]:.4f}"))
    head = ("strategy", "on the device", "on the host", "on disk", "step (CPU)", "last loss")
    said = (
        f"A model of {next(iter(found['offload'].values()))['parameters']:,} parameters, two processes; bytes of the "
    )
    return said + "rank that holds most, each part at its largest moment.\n\n" + markdown(head, rows)


def infinity_part(found: dict) -> str:
    nvme = found["offload"]["zero3_infinity"]["nvme"]
    disk, moved = nvme["disks"][0], nvme["bytes_per_step"][0]
    speeds = [units.rate(disk[f"{name}_bytes_per_second"]) for name in ("write", "read")]
    return (
        f"Measured with the model above: the disk writes {speeds[0]} and reads {speeds[1]}; each rank writes "
        f"{units.size(moved['written'])} and reads {units.size(moved['read'])} in a step.\n"
    )


def plus_plus_part(found: dict) -> str:
    plain = found["plus_plus"]["zero3"]["loss_history"]
    rows = []
    for name, run in found["plus_plus"].items():
        gap = max(abs(a - b) / abs(a) for a, b in zip(plain, run["loss_history"], strict=True))
        sent = f"{run['between_nodes_phi']:.2f}"
        rows.append((name, sent, run["paper_phi"], units.size(run["params_bytes"]), f"{100 * gap:.2f} %"))
    return markdown(("strategy", "between nodes, Φ", "paper Φ", "parameters on a rank", "largest loss gap"), rows)


def errors_part(found: dict) -> str:
    errors = found["quantized_gradient_errors"]
    head = ("root mean square of the gradients", *next(iter(errors.values())))
    return markdown(head, [(size, *(f"{error:.2f}" for error in how.values())) for size, how in errors.items()])


def written(page: str) -> str:
    found = json.loads((RESULTS / "zero_family.json").read_text())
    parts = {"sweep": sweep_part(), "communication": communication_part(found), "offload": offload_part(found)}
    parts |= {"infinity": infinity_part(found), "plus_plus": plus_plus_part(found), "errors": errors_part(found)}
    for name, part in parts.items():
        pattern = rf"(<!-- {name}: begin[^\n]*-->\n).*?(<!-- {name}: end -->)"
        page = re.sub(pattern, lambda known, part=part: f"{known[1]}\n{part}\n{known[2]}", page, flags=re.DOTALL)
    return page


def main(arguments: list[str]) -> int:
    page = PAGE.read_text()
    if "--check" in arguments:
        return int(written(page) != page)
    PAGE.write_text(written(page))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
