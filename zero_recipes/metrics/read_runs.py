"""Folders of runs: every metrics.json with the samples.jsonl beside it, and what sweep.json says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from zero_recipes.core.files import write_text
from zero_recipes.metrics.schema import (
    FILE,
    ORDER,
    SCHEMA,
    ContractError,
    Metrics,
    Part,
    parse_part,
    read_part,
)

SWEEP_FILE = "sweep.json"


class SampleRow(Part):
    """One line of samples.jsonl: a prompt, the answers before and after training, and their scores by metric. In that
    of `zero-recipes ask`, before is the base and after the model."""

    prompt: str  # as the model was asked, the template included
    before: str | None = None  # None where no base was asked
    after: str | None = None
    reference: str | None = None  # the answer in the data
    # by metric: exact_match, token_f1 (0 to 1) and reference_loss (nats/token, over the reference's tokens as training
    # has them; null where max_length leaves none or is not finite); of `zero-recipes ask` also rouge1, rouge2, rougeL
    # (0 to 1) and perplexity (exp of the loss); empty without a reference
    scores_before: dict[str, float | None]
    scores_after: dict[str, float | None] = Field({})


class MeasuredRun(Metrics):
    """One metrics.json together with the folder that it lies in and its samples."""

    folder: Path = Path()
    samples: list[SampleRow] = Field([])
    samples_fault: str | None = None  # why samples.jsonl cannot be read
    swept: dict[str, Any] | None = None  # what a sweep set in it, by key; None unless a sweep.json says so

    @property
    def compared(self) -> bool:
        """True for a row of the sweep, whose folder carries the strategy's name."""
        return self.folder.name == self.strategy

    @property
    def label(self) -> str:
        """How plots and tables call this run."""
        return self.strategy if self.compared else self.folder.name


class UnreadableRun(MeasuredRun):
    """A row for a metrics.json that cannot be read; `error` says why."""

    status: Literal["unreadable"] = "unreadable"


class SweptRun(Part):
    """One run of a sweep."""

    folder: str  # its name, below the sweep's
    strategy: str  # the accelerate file that it was launched with, without .yaml
    values: dict[str, Any]  # by key, in the order of the command line: what the sweep set


class SweepFile(Part):
    """All runs of a folder whose values a sweep set, in the order in which they were to run."""

    schema_version: Literal[1] = Field(alias="schema")
    runs: list[SweptRun]  # those of earlier sweeps into the same folder among them

    def with_runs(self, added: list[SweptRun]) -> SweepFile:
        """The same with further runs; a run in the folder of an earlier one takes its place."""
        return SweepFile(schema=1, runs=list(({run.folder: run for run in self.runs + added}).values()))

    def write(self, folder: Path) -> None:
        write_text(folder / SWEEP_FILE, self.model_dump_json(by_alias=True, indent=2) + "\n")


def read_runs(folder: Path) -> list[MeasuredRun]:
    """Every run in `folder` and one level below: ddp and zero0 to zero3 first, then the others by name, at last those
    of a sweep of values in its order.

    A file that cannot be read is an UnreadableRun, samples that cannot are left out. Raises ContractError where no file
    can be read.
    """
    folder = Path(folder).resolve()  # "." has no name of its own, and names decide what is compared
    runs = [read_run(file) for file in _metrics_files(folder)]
    if all(isinstance(run, UnreadableRun) for run in runs):
        raise ContractError("; ".join(run.error for run in runs[:3]) or f"no {FILE} in {folder} or one level below it")
    swept = {folder / run.folder: run.values for run in read_sweep_file(folder).runs}
    places = list(swept)
    runs.sort(key=lambda run: (places.index(run.folder) if run.folder in swept else -1, *_rank_in_report(run)))
    return [run.model_copy(update={"swept": swept.get(run.folder)}) for run in runs]


def read_run(file: Path) -> MeasuredRun:
    """A metrics.json with the samples beside it, or an UnreadableRun."""
    found: dict[str, Any] = {"folder": file.parent}
    try:
        found["samples"] = read_samples(file.with_name("samples.jsonl"))
    except ContractError as error:
        found["samples_fault"] = str(error)
    try:
        return MeasuredRun.read(file).model_copy(update=found)
    except ContractError as error:
        name = file.parent.name
        return UnreadableRun(schema=SCHEMA, error=str(error), name=name, strategy=name, folder=file.parent)


def read_samples(file: Path) -> list[SampleRow]:
    """One SampleRow per line; an absent file means that no prompts were sampled."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    return [parse_part(SampleRow, line, f"{file} line {number}") for number, line in enumerate(lines, start=1)]


def read_sweep_file(folder: Path) -> SweepFile:
    """The sweep.json of a folder, without runs where there is none. Raises ContractError, which names the file."""
    path = folder / SWEEP_FILE
    return read_part(SweepFile, path) if path.exists() else SweepFile(schema=1, runs=[])


def _metrics_files(folder: Path) -> list[Path]:
    """Every metrics.json in `folder` and one level below, but for what `--overwrite true` has kept there."""
    below = [file for file in sorted(folder.glob(f"*/{FILE}")) if file.parent.suffix != ".previous"]
    return [file for file in (folder / FILE, *below) if file.exists()]


def _rank_in_report(run: MeasuredRun) -> tuple[int, str]:
    listed = run.compared and run.strategy in ORDER
    return (ORDER.index(run.strategy) if listed else len(ORDER), run.folder.name)
