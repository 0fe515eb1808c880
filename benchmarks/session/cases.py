"""The runs of a session on one GPU, by part: cases.yaml."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

TABLE = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())
PARTS = TABLE["parts"]


@dataclass(frozen=True)
class Case:
    """One run; the fields are those of a row of cases.yaml."""

    part: int
    model: str
    strategy: str
    seconds: int
    words: str = ""
    keys: dict[str, Any] = field(default_factory=dict)
    script: str = "run.py"  # of benchmarks/session/

    @property
    def slug(self) -> str:
        name = f"{self.part} {self.model} {self.strategy} {self.words}".lower()
        return re.sub(r"[^a-z0-9.]+", "-", name).strip("-")


def cases(part: int) -> list[Case]:
    return [
        Case(strategy=strategy, **{key: value for key, value in row.items() if key != "strategies"})
        for row in TABLE["runs"]
        if row["part"] == part
        for strategy in row["strategies"]
    ]
