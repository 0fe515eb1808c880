"""Folders of runs: every metrics.json with the samples.jsonl beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from zero_recipes.metrics.parts import Part, known, measured
from zero_recipes.metrics.schema import FILE, ORDER, SCHEMA, ContractError, Metrics, parse_as, read_as, validate
from zero_recipes.metrics.sweep_file import read_sweep_file


class SampleRow(Part):
    """One line of samples.jsonl: a prompt, the answers before and after training, and their scores by metric. In that
    of `zero-recipes ask`, before is the base and after the model."""

    prompt: str = known("as the model was asked, the template included")
    before: str | None = measured("the answer before the first step", null="where no base was asked")
    after: str | None = measured("the answer after the last step", null="where it was not asked for")
    reference: str | None = measured("the answer in the data", null="where there is none")
    scores_before: dict[str, float | None] = known(
        "by metric: exact_match, token_f1 (0 to 1) and reference_loss (nats/token, over the reference's tokens as "
        "training has them; null where `unscored` says why); of `zero-recipes ask` also rouge1, rouge2, rougeL (0 "
        "to 1) and perplexity (exp of the loss); empty without a reference"
    )
    scores_after: dict[str, float | None] = measured("the same after training", default={})
    unscored: str | None = measured(
        "why reference_loss is null, before or after training", null="or missing where it is a number, or nothing is"
    )


class MeasuredRun(Metrics):
    """One metrics.json together with the folder that it lies in and its samples."""

    folder: Path
    samples: list[SampleRow] = Field([])
    samples_fault: str | None = measured("why samples.jsonl cannot be read", null="where it can")
    swept: dict[str, Any] | None = measured("what a sweep set in it, by key", null="unless a sweep.json says so")

    @property
    def compared(self) -> bool:
        """True for a row of the sweep, whose folder carries the strategy's name."""
        return self.folder.name == self.strategy

    @property
    def label(self) -> str:
        """How plots and tables call this run."""
        name = self.strategy if self.compared else self.folder.name
        return name.encode("utf-8", "replace").decode("utf-8")  # a folder's name need not be UTF-8


class UnreadableRun(MeasuredRun):
    """A row for a metrics.json that cannot be read; `error` says why."""

    status: Literal["unreadable"] = "unreadable"


def read_runs(folder: Path) -> list[MeasuredRun]:
    """Every run in `folder` and one level below: ddp and zero0 to zero3 first, then the others by name, at last those
    of a sweep of values in its order.

    Raises ContractError, which names file and key.
    """
    runs = [
        MeasuredRun.read(file, folder=file.parent, samples=read_samples(file.with_name("samples.jsonl")))
        for file in metrics_files(folder)
    ]
    return _in_order(runs, folder)


def read_what_can_be_read(folder: Path) -> list[MeasuredRun]:
    """The same, with an UnreadableRun for every file that cannot be read, and without samples that cannot.

    Raises ContractError where none of them can be read.
    """
    runs = [read_run(file) for file in metrics_files(folder)]
    if all(isinstance(run, UnreadableRun) for run in runs):
        raise ContractError("; ".join(run.error for run in runs[:3]))
    return _in_order(runs, folder)


def read_run(file: Path) -> MeasuredRun:
    """A metrics.json with the samples beside it, or an UnreadableRun. Raises nothing for whatever lies there."""
    folder, samples, fault = file.parent, [], None
    try:
        samples = read_samples(file.with_name("samples.jsonl"))
    except ContractError as error:
        fault = str(error)
    try:
        return MeasuredRun.read(file, folder=folder, samples=samples, samples_fault=fault)
    except ContractError as error:
        return UnreadableRun(
            schema=SCHEMA, status="unreadable", error=str(error), name=folder.name, strategy=folder.name, folder=folder
        )


def metrics_files(folder: Path) -> list[Path]:
    """Every metrics.json in `folder` and one level below, but for what `--overwrite true` has kept there. Raises
    ContractError where there is none."""
    try:
        folder = Path(folder).resolve()  # "." has no name of its own, and names decide what is compared
        inner = sorted(path for path in folder.iterdir() if path.is_dir() and path.suffix != ".previous")
        files = [path / FILE for path in (folder, *inner) if os.path.lexists(path / FILE)]
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name that is none
        raise ContractError(f"{folder}: {error}") from error
    if not files:
        raise ContractError(f"no {FILE} in {folder} or one level below it")
    return files


def _in_order(runs: list[MeasuredRun], folder: Path) -> list[MeasuredRun]:
    """In the report's order, each with what sweep.json says of it. Raises ContractError where that cannot be read."""
    listed = [run.folder for run in read_sweep_file(folder).runs]
    values = {run.folder: run.values for run in read_sweep_file(folder).runs}
    below = Path(folder).resolve()
    known = [
        run.model_copy(update={"swept": values[run.folder.name]})
        if run.folder.name in values and run.folder.parent == below
        else run
        for run in runs
    ]
    swept = sorted((run for run in known if run.swept is not None), key=lambda run: listed.index(run.folder.name))
    return [*sorted((run for run in known if run.swept is None), key=_rank_in_report), *swept]


def _rank_in_report(run: MeasuredRun) -> tuple[int, str]:
    listed = run.compared and run.strategy in ORDER
    return (ORDER.index(run.strategy) if listed else len(ORDER), run.folder.name)


def read_samples(file: Path) -> list[SampleRow]:
    """One SampleRow per line; an absent file means that no prompts were sampled."""
    if not os.path.lexists(file):
        return []
    # Not splitlines(): an answer may hold a bare U+2028, which JSON leaves unescaped and splitlines() cuts at.
    lines = enumerate(read_as(file).split("\n"), start=1)
    return [
        validate(SampleRow, parse_as(line, f"{file} line {number}"), f"{file} line {number}")
        for number, line in lines
        if line.strip()
    ]
