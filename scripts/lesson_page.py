"""Write the tables of docs/lesson.md: python scripts/lesson_page.py [--check]

Bytes of Pythia-6.9B come from zero_recipes/theory, what was measured from docs/demo and benchmarks/results. --check:
exits 1 if the page is another.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.pythia_model_states import parameter_groups, total  # noqa: E402
from zero_recipes.core import units  # noqa: E402
from zero_recipes.theory.deepspeed_comm import explained, volume_terms  # noqa: E402
from zero_recipes.theory.deepspeed_memory import model_state_terms  # noqa: E402
from zero_recipes.theory.lower_bounds import read_at_resume, resumable_bytes  # noqa: E402
from zero_recipes.theory.zero_paper import STAGES, communication_units, model_state_bytes  # noqa: E402

PAGE = ROOT / "docs" / "lesson.md"
RESULTS = ROOT / "benchmarks" / "results"
FORMULAS = ("16Ψ", "4Ψ + 12Ψ/N", "2Ψ + 14Ψ/N", "16Ψ/N")
PHI = 2  # bytes of a parameter in bf16


def read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def markdown(headers: Iterable[str], rows: Iterable[Iterable[object]], left: int = 1) -> str:
    """A table whose first `left` columns are text."""
    headers = list(headers)
    lines = [headers, ["---"] * left + ["---:"] * (len(headers) - left), *([str(c) for c in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


@cache
def groups() -> list[list[int]]:
    return parameter_groups("pythia-6.9b")


def psi() -> int:
    return sum(map(sum, groups()))


def size(number_of_bytes: float) -> str:
    """GB with one decimal, so that a column adds up to the eye."""
    return f"{number_of_bytes / 1e9:.1f} GB"


def deepspeed_bytes(world_size: int, stage: int) -> int:
    """What DeepSpeed holds of Pythia-6.9B at its fullest moment, on the rank that holds most."""
    bucket = 4096**2  # "auto": the square of the hidden size
    ranks = range(world_size)
    return max(total(model_state_terms(groups(), world_size, rank, stage, bucket)) for rank in ranks)


def components() -> str:
    one = model_state_bytes(1, 1, 0)
    rows = [
        ("parameter, bf16", one.params, "forward and backward compute with it"),
        ("gradient, bf16", one.grads, "backward writes it, the optimizer reads it"),
        ("master weight, fp32", one.optimizer / 3, "the parameter that the optimizer really changes"),
        ("first moment, fp32", one.optimizer / 3, "Adam's running mean of the gradients"),
        ("second moment, fp32", one.optimizer / 3, "Adam's running mean of their squares"),
        ("**all**", one.total, ""),
    ]
    told = [(what, why, f"{each:g}", size(each * psi())) for what, each, why in rows]
    head = ("what", "what for", "bytes a parameter", "Pythia-6.9B")
    return f"Pythia-6.9B has {psi():,} parameters.\n\n" + markdown(head, told, left=2)


def stages() -> str:
    rows = []
    for stage in STAGES:
        cells = [FORMULAS[stage]]
        for world_size in (2, 8):
            cells += [
                size(model_state_bytes(psi(), world_size, stage).total),
                size(deepspeed_bytes(world_size, stage)),
            ]
        rows.append((stage, *cells))
    head = ("stage", "textbook", "2 GPUs, textbook", "2 GPUs, DeepSpeed", "8 GPUs, textbook", "8 GPUs, DeepSpeed")
    return markdown(head, rows, left=2)


def tiny() -> str:
    rows = []
    for stage in STAGES:
        run = json.loads((ROOT / "docs" / "demo" / f"zero{stage}" / "metrics.json").read_text())
        held = max(run["model_state_bytes"], key=lambda r: r["params"] + r["grads"] + r["optimizer"])
        parts = [held[part] for part in ("params", "grads", "optimizer")]
        textbook = model_state_bytes(run["parameters"], run["world_size"], stage).total
        rows.append((stage, *(f"{part:,}" for part in (*parts, sum(parts), int(textbook)))))
    said = (
        f"Measured, in bytes: the tiny world's model of {run['parameters']:,} parameters, two CPU processes, bf16.\n\n"
    )
    return said + markdown(("stage", "parameters", "gradients", "optimizer", "all", "textbook"), rows)


def volume() -> str:
    rows = []
    for stage in STAGES:
        terms = volume_terms(stage, accumulation=1, kept=False)
        phi = sum(terms.values())
        found = explained(terms).replace(" at every micro step", "").replace(" at the last micro step", "")
        rows.append((stage, f"{communication_units(stage)}Φ", f"{phi:g}Φ", found, size(phi * PHI * psi())))
    return markdown(("stage", "textbook", "DeepSpeed", "which is", "Pythia-6.9B, one step"), rows)


def sent() -> str:
    rows = []
    for row in read("zero_family")["communication"]:
        names = [name.replace("_", "-") for name, size in row["bytes_by_collective"].items() if size > 100]
        rows.append((row["what"], row["micro_steps"], ", ".join(names), f"{row['measured_phi']:.2f}Φ"))
    said = "Measured on two CPU processes, bytes through each collective of one step:\n\n"
    return said + markdown(("stage", "micro steps", "collectives", "sent"), rows)


def offload() -> str:
    found, rows = read("zero_family")["offload"], []
    for name, run in found.items():
        rank = max(run["model_state_bytes"], key=lambda r: r["params"] + r["grads"] + r["optimizer"])
        here = rank["params"] + rank["grads"] + rank["optimizer"]
        rows.append((name, *(units.size(part) for part in (here, rank["offloaded_host"], rank["offloaded_disk"]))))
    said = f"Measured: {found['zero2']['parameters']:,} parameters, two CPU processes, bytes of one of them.\n\n"
    return said + markdown(("strategy", "on the device", "in host memory", "on disk"), rows)


def plus_plus() -> str:
    what = {
        "zero3": "gather, gather, reduce",
        "zero3_qwz": "both gathers in int8",
        "zero3_hpz": "the second gather stays inside the machine",
        "zero3_qgz": "the reduction in int4",
        "zero3_plus_plus": "all three",
    }
    found = read("zero_family")["plus_plus"]
    rows = [
        (n, said, f"{found[n]['paper_phi']:g}Φ", f"{found[n]['between_nodes_phi']:.2f}Φ") for n, said in what.items()
    ]
    return markdown(("strategy", "what changes", "paper", "measured between machines"), rows, left=2)


def fsdp() -> str:
    rows = [
        (row["strategy"], *(f"{row[f'{part}_bytes']:,}" for part in ("params", "grads", "optimizer", "state")))
        for row in read("fsdp")["rows"]
        if row["strategy"] in ("zero3", "fsdp2")
    ]
    return markdown(("strategy", "parameters", "gradients", "optimizer", "all bytes"), rows)


def checkpoints() -> str:
    weights, optimizer = 2 * psi(), 12 * psi()
    rows = [
        (
            stage,
            size(weights),
            size(resumable_bytes(weights, optimizer, stage)),
            size(read_at_resume(weights, optimizer, stage, 2)),
        )
        for stage in STAGES
    ]
    head = ("stage", "the model", "a checkpoint to go on from", "read by each of 2 processes to go on")
    return "Pythia-6.9B, in bf16, on disk:\n\n" + markdown(head, rows)


PARTS = (components, stages, tiny, volume, sent, offload, plus_plus, fsdp, checkpoints)


def written(page: str) -> str:
    for part in PARTS:
        pattern = rf"(<!-- {part.__name__}: begin[^\n]*-->\n).*?(<!-- {part.__name__}: end -->)"
        assert re.search(pattern, page, flags=re.DOTALL), f"{PAGE} has no place for {part.__name__}"
        page = re.sub(pattern, lambda known, part=part: f"{known[1]}\n{part()}\n{known[2]}", page, flags=re.DOTALL)
    return page


def main(arguments: list[str]) -> int:
    page = PAGE.read_text()
    if "--check" in arguments:
        return int(written(page) != page)
    PAGE.write_text(written(page))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
