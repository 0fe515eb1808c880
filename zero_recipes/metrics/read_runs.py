"""Folders of runs: every metrics.json with the samples.jsonl beside it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from zero_recipes.metrics.parts import Part, known, measured
from zero_recipes.metrics.schema import FILE, ORDER, ContractError, Metrics, parse_as, validate


class SampleRow(Part):
    """One line of samples.jsonl: a prompt, the answers before and after training, and their scores by metric."""

    prompt: str = known("as the model was asked, the template included")
    before: str = known("the answer before the first step")
    after: str | None = measured("the answer after the last step", null="where it was not asked for")
    reference: str | None = measured("the answer in the data", null="where there is none")
    scores_before: dict[str, float | None] = known(
        "by metric: exact_match, token_f1 (0 to 1) and reference_loss (nats/token, over the reference's tokens as "
        "training has them; null where `unscored` says why); empty without a reference"
    )
    scores_after: dict[str, float | None] = measured("the same after training", default={})
    unscored: str | None = measured(
        "why reference_loss is null, before or after training", null="or missing where it is a number, or nothing is"
    )


class MeasuredRun(Metrics):
    """One metrics.json together with the folder that it lies in and its samples."""

    folder: Path
    samples: list[SampleRow] = Field([])

    @property
    def compared(self) -> bool:
        """True for a row of the sweep, whose folder carries the strategy's name."""
        return self.folder.name == self.strategy

    @property
    def label(self) -> str:
        """How plots and tables call this run."""
        return self.strategy if self.compared else self.folder.name


def read_runs(folder: Path) -> list[MeasuredRun]:
    """Every run in `folder` and one level below: ddp and zero0 to zero3 first, then the others by name.

    Raises ContractError, which names file and key.
    """
    folder = Path(folder).resolve()  # "." has no name of its own, and names decide what is compared
    files = [folder / FILE, *sorted(folder.glob(f"*/{FILE}"))]
    runs = [
        MeasuredRun.read(file, folder=file.parent, samples=read_samples(file.with_name("samples.jsonl")))
        for file in files
        if file.is_file()
    ]
    if not runs:
        raise ContractError(f"no {FILE} in {folder} or one level below it")
    return sorted(runs, key=_rank_in_report)


def _rank_in_report(run: MeasuredRun) -> tuple[int, str]:
    listed = run.compared and run.strategy in ORDER
    return (ORDER.index(run.strategy) if listed else len(ORDER), run.folder.name)


def read_samples(file: Path) -> list[SampleRow]:
    """One SampleRow per line; an absent file means that no prompts were sampled."""
    if not file.is_file():
        return []
    # Not splitlines(): an answer may hold a bare U+2028, which JSON leaves unescaped and splitlines() cuts at.
    lines = enumerate(file.read_text(encoding="utf-8").split("\n"), start=1)
    return [
        validate(SampleRow, parse_as(line, f"{file} line {number}"), f"{file} line {number}")
        for number, line in lines
        if line.strip()
    ]
