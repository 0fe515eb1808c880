"""The tables of docs/plan.md, from planners.json, blind.json and scenarios.json in benchmarks/results."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
VERDICTS = ("fits", "may run out", "does not fit")
# the name in the page, the file, the group
MEMORY = (
    ("configuration and reading exact (goal 3 %)", "planners", "configuration and reading exact"),
    ("allocator, live tensors (goal 10 %)", "planners", "allocator, live tensors"),
    ("allocator, reserved", "planners", "allocator, reserved"),
    ("reading not stated", "planners", "card, or reading not stated"),
    ("ZeRO on several GPUs, simulated", "planners", "several GPUs, engine simulated"),
    ("formulas (FSDP, ZeRO++)", "planners", "by formulas (FSDP, ZeRO++)"),
    ("all", "planners", "all rows"),
    ("blind, all", "blind", "all rows"),
    ("blind, several GPUs, simulated", "blind", "several GPUs, engine simulated"),
)
REGIMES = ("offload", "one machine, long passes", "one machine, short passes", "several machines")


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def tables() -> dict[str, list[str]]:
    """{the table's name between its marks: its lines}."""
    return {
        ": verdicts": [*verdict_rows()],
        ": memory": [*memory_rows()],
        ": times": [*time_rows()],
        ": machines": [*machine_rows()],
    }


def verdict_rows() -> Iterator[str]:
    """What the plan says of published runs on their cards, and what it said before."""
    yield "| runs | fits | may run out | does not fit | before: fits | may run out | does not fit |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, file, outcome in (
        ("published, that ran", "planners", "ran"),
        ("blind, that ran", "blind", "ran"),
        ("published, that died of memory", "planners", "died"),
    ):
        verdicts = read(file)["verdicts"]
        counts = [verdicts[of][verdict] for of in (outcome, f"{outcome}, earlier") for verdict in VERDICTS]
        yield row(name, *counts)


def memory_rows() -> Iterator[str]:
    """Errors of predicted peaks, by how they were read."""
    yield "| rows | n | median error | lowest | highest | within the goal | in the range |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, file, group in MEMORY:
        found = read(file)["groups"][group]
        inside = "{} of {}".format(*found["inside"]) if "inside" in found else ""
        errors = [f"{100 * found['median']:.1f} %", signed(found["lowest"]), signed(found["highest"])]
        yield row(name, found["rows"], *errors, found["within_goal"], inside)


def time_rows() -> Iterator[str]:
    """Measured step times within the likely and the whole range."""
    yield (
        "| rows | n | likely | whole | likely, without their source | whole, without their source |"
        " median width of the whole | without their source | median error of the middle |"
    )
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    times, blind = read("planners")["times"], read("blind")["times"]
    for regime in REGIMES:
        yield time_row(regime, times["regimes"][regime])
    yield time_row("all", times["all"] | {"rows": len(times["rows"])})
    for regime, found in blind["regimes"].items():
        yield time_row(f"blind, {regime}", found)


def time_row(name: str, found: dict[str, Any]) -> str:
    held = [found.get(key, "") for key in ("likely", "held", "likely_left_out", "left_out")]
    widths = [f"{found[key]:.1f}" if key in found else "" for key in ("width", "width_left_out")]
    return row(name, found["rows"], *held, *widths, f"{100 * found['median']:.1f} %")


def machine_rows() -> Iterator[str]:
    """Known models on known machines."""
    yield (
        "| model | GPUs | fits among ddp and stages 0 to 3 | recommended | peak per GPU | offloaded per node |"
        " likely tokens/s |"
    )
    yield "| --- | --- | --- | --- | ---: | ---: | --- |"
    for found in read("scenarios")["scenarios"]:
        fits = ", ".join(found["fits"]) or "none"
        if found["tight"]:
            fits += f"; may run out: {', '.join(found['tight'])}"
        taken = ["none", "", "", ""]
        if found["recommended"]:
            host = found["host_bytes_of_a_node"]
            speed = " to ".join(f"{tokens:,.0f}" for tokens in found["likely_tokens_per_second"])
            taken = [found["recommended"], gigabytes(found["peak_bytes"]), gigabytes(host) if host else "", speed]
        yield row(model_name(found["model"]), f"{found['count']} x {card_name(found['gpu'])}", fits, *taken)


def row(*cells: Any) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def signed(share: float) -> str:
    return f"{100 * share:+.1f} %"


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size < 1e12 else f"{size / 1e12:.2f} TB"


def model_name(name: str) -> str:
    """meta-llama/Llama-2-7b-hf is Llama-2-7B."""
    short = name.rpartition("/")[2].removesuffix("-hf").removesuffix("-deduped")
    family, _, size = short.rpartition("-")
    return f"{family[0].upper()}{family[1:]}-{size.upper()}".replace("Gpt3", "GPT-3")


def card_name(name: str) -> str:
    """h100-80gb is H100 80 GB."""
    card, _, memory = name.partition("-")
    return f"{card.upper()} {memory.removesuffix('gb')} GB"
