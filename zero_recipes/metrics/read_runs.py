"""Folders of runs: metrics.json, samples.jsonl and sweep.json."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import Field

from zero_recipes.core.files import write_text
from zero_recipes.metrics import schema

SWEEP_FILE = "sweep.json"


class SampleRow(schema.Part):
    """A line of samples.jsonl: a prompt, and the answers before and after training with their scores.

    In the file of `zero-recipes ask`, before is the base and after the model.
    """

    prompt: str  # as the model got it, the template included
    before: str | None = None  # None where the base gave no answer
    after: str | None = None
    reference: str | None = None  # the answer in the data
    # by score, of those in `sample_metrics`; None where it is not a number; empty without a reference
    scores_before: dict[str, float | None]
    scores_after: dict[str, float | None] = Field({})
    errors: dict[str, str] = Field({})  # by metric: what it raised, in place of scores that are None


def mean_scores(samples: Sequence[SampleRow]) -> dict[str, tuple[float | None, float, int]]:
    """The means of each score before and after training: {metric: (mean before, mean after, rows)}.

    Of the rows that are scored both times. The mean before is None without a base.
    """
    has_base = any(sample.before is not None for sample in samples)
    scored: dict[str, list] = {}
    for sample in samples:
        for name, after in sample.scores_after.items():
            pairs = scored.setdefault(name, [])
            before = sample.scores_before.get(name)
            if after is not None and (before is not None or not has_base):
                pairs.append((before, after))
    means = {}
    for name, pairs in scored.items():
        if pairs:
            before = fmean(b for b, _ in pairs) if has_base else None
            means[name] = before, fmean(a for _, a in pairs), len(pairs)
    return means


def metric_errors(samples: Sequence[SampleRow]) -> dict[str, tuple[str, int]]:
    """What metrics have failed of: {metric: (the first error that it raised, rows of which it raised any)}."""
    failed: dict[str, tuple[str, int]] = {}
    for sample in samples:
        for name, error in sample.errors.items():
            first, count = failed.get(name, (error, 0))
            failed[name] = first, count + 1
    return failed


def question(prompt: str) -> str:
    """A prompt without Alpaca's wrapper, for reading."""
    inside = prompt.partition("### Instruction:\n")[2].removesuffix("### Response:\n").strip()
    return inside.replace("\n\n### Input:\n", "\n") or prompt


def short(text: str | None, most: int = 220) -> str:
    """The end of a text, of at most so many characters and a mark of what is left out."""
    text = text or ""
    return text if len(text) <= most else "... " + text[-most:]


class MeasuredRun(schema.Metrics):
    """One run that was read from its folder: metrics.json, its samples, and what a sweep set in it."""

    folder: Path = Path()
    samples: list[SampleRow] = Field([])
    swept: dict[str, Any] | None = None  # what a sweep set in it, by key; None unless a sweep.json says so

    @property
    def compared(self) -> bool:
        """Whether the run is one of several strategies that are compared: its folder carries the strategy's name."""
        return self.folder.name == self.strategy

    @property
    def label(self) -> str:
        """The run's name in plots and tables."""
        return self.strategy if self.compared else self.folder.name


class SweptRun(schema.Part):
    """One run of a sweep, as sweep.json has it."""

    folder: str  # its name, below the sweep's
    strategy: str  # the accelerate file that it was launched with, without .yaml
    values: dict[str, Any]  # by key, in the order of the command line: what the sweep set


class SweepFile(schema.Part):
    """The content of sweep.json: the runs of a sweep, in the order in which they were to run."""

    schema_version: Literal[1] = Field(alias="schema")
    runs: list[SweptRun]  # those of earlier sweeps into the same folder among them


def draw_losses(axes: Any, run: schema.Metrics) -> None:
    """Draw a run's losses, of training and of evaluations, into `axes` of matplotlib."""
    marker = "." if len(run.losses) < 20 else ""
    axes.plot([*run.losses], [*run.losses.values()], color="#33608c", lw=1.2, marker=marker, label="training")
    evaluated = {entry.step: entry.loss for entry in run.eval_history or []}
    if evaluated:
        axes.plot([*evaluated], [*evaluated.values()], color="#cc4b58", lw=1.6, marker="o", ms=5, label="evaluation")
    axes.set(xlabel="optimizer step", ylabel="loss")
    axes.locator_params(axis="x", integer=True)
    axes.legend(frameon=False)


def read_runs(folder: Path) -> list[MeasuredRun]:
    """The runs in `folder` and one level below, without what `--overwrite true` has kept.

    ddp and zero0 to zero3 first, then the others by name, at last those of a sweep of values in its order.
    Raises ContractError, also where there is none.
    """
    folder = Path(folder).resolve()  # "." has no name of its own, and names decide what is compared
    swept = {folder / run.folder: run.values for run in read_sweep_file(folder).runs}
    below = [file for file in sorted(folder.glob(f"*/{schema.FILE}")) if file.parent.suffix != ".previous"]
    runs = []
    for file in (folder / schema.FILE, *below):
        if file.exists():
            samples = read_samples(file.with_name("samples.jsonl"))
            about = {"folder": file.parent, "samples": samples, "swept": swept.get(file.parent)}
            runs.append(schema.read_part(MeasuredRun, file).model_copy(update=about))
    if not runs:
        raise schema.ContractError(f"no {schema.FILE} in {folder} or one level below it")
    of_sweep = list(swept)

    def place(run: MeasuredRun) -> tuple[int, int, str]:
        in_sweep = of_sweep.index(run.folder) if run.folder in swept else -1
        in_order = len(schema.ORDER)
        if run.compared and run.strategy in schema.ORDER:
            in_order = schema.ORDER.index(run.strategy)
        return in_sweep, in_order, run.folder.name

    return sorted(runs, key=place)


def read_samples(file: Path) -> list[SampleRow]:
    """The rows of a samples.jsonl; none where there is no such file. Raises ContractError, which names the line."""
    if not file.exists():
        return []
    rows = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        rows.append(schema.parse_part(SampleRow, line, f"{file} line {number}"))
    return rows


def read_sweep_file(folder: Path) -> SweepFile:
    """The sweep.json of a folder; one without runs where there is none. Raises ContractError."""
    path = folder / SWEEP_FILE
    if path.exists():
        return schema.read_part(SweepFile, path)
    return SweepFile(schema=1, runs=[])


def add_to_sweep_file(folder: Path, added: list[SweptRun]) -> None:
    """Add runs to a folder's sweep.json. One in an earlier run's folder takes its place. Raises ContractError."""
    runs = {run.folder: run for run in read_sweep_file(folder).runs + added}
    document = SweepFile(schema=1, runs=list(runs.values()))
    write_text(folder / SWEEP_FILE, document.model_dump_json(by_alias=True, indent=2) + "\n")
