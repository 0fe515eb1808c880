"""The codes of all findings: what each means, and which of them `ignore` may turn into a warning."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

# by the first digit of a code
AREAS = {
    "1": "recipe and command line",
    "2": "DeepSpeed configuration",
    "3": "launch",
    "4": "model",
    "5": "data",
    "6": "machine",
    "7": "checkpoints and resuming",
    "8": "planner",
}
# Errors that a run can go on with, and why that is safe: it is slower, larger or not proven, but never another run.
IGNORABLE = {
    "ZR217": "the run trains with the scheduler as it is written",
    "ZR223": "the second copy of the weights costs memory alone",
    "ZR226": "DeepSpeed reads the key at stage 3 only",
    "ZR239": "DeepSpeed reads the block for pipeline modules only",
    "ZR531": "the run trains on the chats as they are",
    "ZR533": "an empty answer can be what the model is to learn",
    "ZR608": "it is an estimate of host memory",
    "ZR609": "it is an estimate of what checkpoints take on the disk",
    "ZR610": "it is an estimate of the download's size",
    "ZR619": "it is an estimate of what is swapped to the disk",
    "ZR816": "it is an estimate of GPU memory",
}


@cache
def table() -> dict[str, dict[str, Any]]:
    """{code: {"area", "level", "what", "why", "fix" and, for most, "example"}}; made by scripts/checks_page.py."""
    return json.loads(resources.files(__package__).joinpath("codes.json").read_text())


def requested(ignore: list[str] | str | None) -> frozenset[str]:
    """The codes of a recipe's `ignore` key; one text may hold several by comma."""
    text = ignore if isinstance(ignore, str) else " ".join(ignore or [])
    return frozenset(text.replace(",", " ").upper().split())


def near(code: str) -> list[str]:
    """The three known codes that are next to this one by number; none if it has no digit."""
    digits = "".join(filter(str.isdigit, code))
    return sorted(table(), key=lambda known: abs(int(known[2:]) - int(digits)))[:3] if digits else []
