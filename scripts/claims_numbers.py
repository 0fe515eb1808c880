"""What scripts/claims_page.py needs for each claim, and where its numbers come from: theory/, hardware.yaml, JSON."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from zero_recipes.core import units  # noqa: E402
from zero_recipes.theory.zero_paper import model_state_bytes  # noqa: E402

VERDICTS = ("true", "true in the limit", "depends", "false", "needs a GPU")
ZERO, OFFLOAD = "ZeRO, arXiv:1910.02054", "ZeRO-Offload, arXiv:2101.06840"
INFINITY, PLUS_PLUS = "ZeRO-Infinity, arXiv:2104.07857", "ZeRO++, arXiv:2306.10209"
B = 10**9


class Claim(NamedTuple):
    """One statement and what became of it. `proof`: tests (file::name) or codes that hold it."""

    name: str
    said: str
    derived: str
    measured: str
    verdict: str
    proof: tuple[str, ...]


@cache
def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


@cache
def gpus() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "zero_recipes" / "core" / "hardware.yaml").read_text())


def states(parameters: float, world_size: int, stage: int, optimizer: int = 12) -> float:
    """Bytes a GPU, by the paper."""
    return model_state_bytes(int(parameters), world_size, stage, optimizer=optimizer).total


def staircase(parameters: float, world_size: int, stages=(0, 1, 2, 3), optimizer: int = 12) -> str:
    """ "112 / 70.0 / 63.0 / 56.0 GB" of the stages."""
    found = [states(parameters, world_size, stage, optimizer) / 1e9 for stage in stages]
    return " / ".join(f"{value:,.0f}" if value >= 100 else units.significant(value) for value in found) + " GB"


def saving(world_size: int) -> str:
    """How many times less than stage 0 the stages 1, 2 and 3 hold."""
    return " / ".join(f"{states(B, world_size, 0) / states(B, world_size, s):.1f}" for s in (1, 2, 3))


def per_parameter(world_size: int) -> str:
    return " / ".join(f"{states(B, world_size, s) / B:g}Ψ" for s in (1, 2, 3))


def swept(strategy: str, name: str = "sweep_all") -> dict[str, Any]:
    (row,) = (row for row in result(name)["rows"] if row["strategy"] == strategy)
    return row


def sent(what: str, micro_steps: int = 1) -> str:
    """Measured units of Φ of one run of docs/zero_family.md."""
    rows = result("zero_family")["communication"]
    (row,) = (row for row in rows if row["what"] == what and row["micro_steps"] == micro_steps)
    return f"{row['measured_phi']:.2f}Φ"


def tokens_per_second(strategy: str, program: str = "engine", workload: str = "12M, Alpaca") -> float:
    rates = result("throughput")["workloads"][workload]["strategies"][strategy]["programs"][program]
    return max(rates["tokens_per_second"])


def slower(strategy: str, than: str) -> str:
    """By how much, in percent, the bare DeepSpeed loop of docs/throughput.md."""
    gap = 1 - tokens_per_second(strategy) / tokens_per_second(than)
    return f"{abs(gap):.0%} {'slower' if gap >= 0 else 'faster'}"


def scenario(model: str, count: int, gpu: str) -> dict[str, Any]:
    (row,) = (
        row
        for row in result("scenarios")["scenarios"]
        if model in row["model"] and (row["count"], row["gpu"]) == (count, gpu)
    )
    return row


def verdict_of(row: dict[str, Any], strategy: str) -> str:
    """ "zero2: no, 82.3 GB of 85.5 GB"."""
    found = row["strategies"][strategy]
    peak, whole = units.size(found["allocated_peak_bytes"]), units.size(row["gpu_memory_bytes"])
    return f"{strategy}: {found['verdict']}, {peak} of {whole}"


def knob(group: str, strategy: str, value: int) -> dict[str, Any]:
    rows = result("knobs")["groups"][group]["rows"]
    return next(row for row in rows if row["strategy"] == strategy and value in row["swept"].values())


def simulated_peak(group: str, strategy: str, value: int) -> int:
    return knob(group, strategy, value)["simulated"]["allocated_peak_bytes"]
