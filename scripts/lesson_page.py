"""Write the tables of docs/lesson.md: python scripts/lesson_page.py [--check]

Bytes of Pythia-6.9B come from zero_recipes/theory, rates of links from zero_recipes/core/hardware.yaml, what was
measured from docs/demo and benchmarks/results. --check: exits 1 if the page is another.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.pythia_model_states import parameter_groups, total  # noqa: E402
from zero_recipes.core import units  # noqa: E402
from zero_recipes.plan.cost import NVME  # noqa: E402
from zero_recipes.theory.deepspeed_comm import explained, volume_terms  # noqa: E402
from zero_recipes.theory.deepspeed_memory import model_state_terms  # noqa: E402
from zero_recipes.theory.lower_bounds import read_at_resume, resumable_bytes  # noqa: E402
from zero_recipes.theory.zero_paper import STAGES, communication_units, model_state_bytes  # noqa: E402

PAGE = ROOT / "docs" / "lesson.md"
RESULTS = ROOT / "benchmarks" / "results"
FORMULAS = ("16Ψ", "4Ψ + 12Ψ/N", "2Ψ + 14Ψ/N", "16Ψ/N")
INSIDE_THE_STEP = ("20Ψ", "2Ψ + 18Ψ/N", "2Ψ + 18Ψ/N", "20Ψ/N")  # DeepSpeed, with the gradients' fp32 copies
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
        cells = [FORMULAS[stage], INSIDE_THE_STEP[stage]]
        for world_size in (2, 8):
            cells += [
                size(model_state_bytes(psi(), world_size, stage).total),
                size(deepspeed_bytes(world_size, stage)),
            ]
        rows.append((stage, *cells))
    sizes = [f"{world_size} GPUs, {who}" for world_size in (2, 8) for who in ("textbook", "DeepSpeed")]
    return markdown(("stage", "textbook", "DeepSpeed, inside the step", *sizes), rows, left=3)


def tiny() -> str:
    rows = []
    for stage in STAGES:
        run = json.loads((ROOT / "docs" / "demo" / f"zero{stage}" / "metrics.json").read_text())
        held = max(run["model_state_bytes"], key=lambda r: r["params"] + r["grads"] + r["optimizer"])
        parts = [held[part] for part in ("params", "grads", "optimizer")]
        textbook = model_state_bytes(run["parameters"], run["world_size"], stage).total
        rows.append((stage, *(f"{part:,}" for part in (*parts, sum(parts), int(textbook)))))
    said = (
        f"Measured, in bytes of the tensors that DeepSpeed holds: the tiny world's model, {run['parameters']:,} "
        "parameters in bf16, one of two CPU processes. Masters are in the column of the optimizer.\n\n"
    )
    return said + markdown(("stage", "parameters", "gradients", "optimizer", "all", "textbook"), rows)


def volume() -> str:
    found = {(row["what"], row["micro_steps"]): row["measured_phi"] for row in read("zero_family")["communication"]}
    rows = []
    for what in dict.fromkeys(what for what, _ in found):
        stage, to_owners = int(what.split(",")[0].removeprefix("stage ")), "textbook's switch" in what
        terms = volume_terms(stage, 1, multi_rank_buckets=not to_owners, kept="kept gathered" in what)
        which = explained(terms).replace(" at every micro step", "").replace(" at the last micro step", "")
        sent = [f"{found[what, steps]:.2f}Φ" if (what, steps) in found else "" for steps in (1, 4)]
        named = what.replace("textbook's switch", "reduced to each owner")
        one_step = size(sum(terms.values()) * PHI * psi()) if "kept gathered" not in what else "too large"
        rows.append((named, f"{communication_units(stage)}Φ", which, *sent, one_step))
    said = "What a GPU sends in one optimizer step; measured on two CPU processes, of Pythia-6.9B computed:\n\n"
    head = ("stage", "textbook", "DeepSpeed", "measured", "with 4 micro steps", "Pythia-6.9B")
    return said + markdown(head, rows, left=3)


def links() -> str:
    """The ways out of one GPU by data sheets, and how long Φ takes on each."""
    gpu = yaml.safe_load((ROOT / "zero_recipes" / "core" / "hardware.yaml").read_text())["h100-80gb"]
    ways = {
        "its own memory": gpu["memory_gb_s"],
        "NVLink, to the GPUs of its machine": gpu["link_gb_s"],
        "PCIe, to the memory of the host": gpu["host_gb_s"],
        f"a network of {8 * gpu['network_gb_s']} Gb/s, to other machines": gpu["network_gb_s"],
        "an NVMe disk, at best and for all GPUs of the machine": NVME[1] / 1e9,
    }
    phi = PHI * psi()
    rows = [(way, f"{rate:,g}", f"{phi / 1e9 / rate:.2g} s") for way, rate in ways.items()]
    return markdown(("from one H100", "GB/s, one direction", f"time for Φ of Pythia-6.9B ({size(phi)})"), rows)


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
        "zero3": "1 + 1 + 1",
        "zero3_qwz": "½ + ½ + 1: gathers in int8",
        "zero3_hpz": "1 + 0 + 1: the second gather stays inside the machine",
        "zero3_qgz": "1 + 1 + ¼: the reduction in int4",
        "zero3_plus_plus": "½ + 0 + ¼: all three",
    }
    found = read("zero_family")["plus_plus"]
    rows = [
        (n, said, f"{found[n]['paper_phi']:g}Φ", f"{found[n]['between_nodes_phi']:.2f}Φ") for n, said in what.items()
    ]
    head = ("strategy", "gather in forward + in backward + reduction", "paper", "measured between machines")
    return markdown(head, rows, left=2)


def checkpoints() -> str:
    weights, optimizer = 2 * psi(), 12 * psi()
    stages_of: dict[tuple[str, ...], list[str]] = {}
    for stage in STAGES:
        written_and_read = resumable_bytes(weights, optimizer, stage), read_at_resume(weights, optimizer, stage, 2)
        stages_of.setdefault(tuple(map(size, (weights, *written_and_read))), []).append(str(stage))
    head = ("stage", "the model", "a checkpoint to go on from", "read at once by each of 2 processes to go on")
    rows = [(" and ".join(stages), *cells) for cells, stages in stages_of.items()]
    return "Pythia-6.9B, in bf16, on disk:\n\n" + markdown(head, rows)


PARTS = (components, stages, tiny, volume, links, offload, plus_plus, checkpoints)


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
