"""sweep.json: which values `zero-recipes sweep --set` gave to the runs in its folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from zero_recipes.core.files import write_text
from zero_recipes.metrics.parts import Part, known
from zero_recipes.metrics.schema import ContractError, parse_as, read_as, validate

SWEEP_FILE = "sweep.json"


class SweptRun(Part):
    """One run of a sweep."""

    folder: str = known("its folder's name, below the sweep's")
    strategy: str = known("the accelerate file that it was launched with, without .yaml")
    values: dict[str, Any] = known("by key, in the order of the command line: the value that the sweep set")


class SweepFile(Part):
    """All runs of a folder whose values a sweep set, in the order in which they were to run."""

    schema_version: Literal[1] = known("version of this contract", alias="schema")
    runs: list[SweptRun] = known("those of earlier sweeps into the same folder among them")

    def with_runs(self, added: list[SweptRun]) -> SweepFile:
        """The same with further runs; a run in the folder of an earlier one takes its place."""
        return SweepFile(schema=1, runs=list(({run.folder: run for run in self.runs + added}).values()))

    def write(self, folder: Path) -> None:
        write_text(folder / SWEEP_FILE, self.model_dump_json(by_alias=True, indent=2) + "\n")


def read_sweep_file(folder: Path) -> SweepFile:
    """The sweep.json of a folder, without runs where there is none. Raises ContractError, which names the file."""
    path = folder / SWEEP_FILE
    if not os.path.lexists(path):
        return SweepFile(schema=1, runs=[])
    content = parse_as(read_as(path), str(path))
    if not isinstance(content, dict):
        raise ContractError(f"{path}: expected one JSON object, found {type(content).__name__}")
    return validate(SweepFile, content, str(path))
