"""Folders of runs: every metrics.json with the samples.jsonl beside it, and what sweep.json says of them."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import Field

from zero_recipes.core.files import write_text
from zero_recipes.metrics import schema

SWEEP_FILE = "sweep.json"


class SampleRow(schema.Part):
    """One line of samples.jsonl: a prompt, the answers before and after training, and their scores by metric. In that
    of `zero-recipes ask`, before is the base and after the model."""

    prompt: str  # as the model got it, the template included
    before: str | None = None  # None where the base gave no answer
    after: str | None = None
    reference: str | None = None  # the answer in the data
    # by metric: exact_match, token_f1 (0 to 1) and reference_loss (nats/token, over the reference's tokens as training
    # has them; null where max_length leaves none or is not finite); of `zero-recipes ask` also rouge1, rouge2, rougeL
    # (0 to 1) and perplexity (exp of the loss); empty without a reference
    scores_before: dict[str, float | None]
    scores_after: dict[str, float | None] = Field({})


def mean_scores(samples: Sequence[SampleRow]) -> dict[str, tuple[float | None, float, int]]:
    """{metric: (mean before, mean after, rows)}, of the rows scored both times; before is None without a base."""
    has_base, means = any(sample.before is not None for sample in samples), {}
    for name in dict.fromkeys(name for sample in samples for name in sample.scores_after):
        pairs = [(sample.scores_before.get(name), sample.scores_after.get(name)) for sample in samples]
        scored = [(b, a) for b, a in pairs if a is not None and (b is not None or not has_base)]
        if scored:
            before = fmean(b for b, _ in scored) if has_base else None
            means[name] = before, fmean(a for _, a in scored), len(scored)
    return means


def question(prompt: str) -> str:
    """A prompt without Alpaca's wrapper, for reading."""
    inside = prompt.partition("### Instruction:\n")[2].removesuffix("### Response:\n").strip()
    return inside.replace("\n\n### Input:\n", "\n") or prompt


def short(text: str | None, most: int = 220) -> str:
    return "" if text is None else text if len(text) <= most else "... " + text[-most:]


class MeasuredRun(schema.Metrics):
    """One metrics.json together with its folder and its samples."""

    folder: Path = Path()
    samples: list[SampleRow] = Field([])
    swept: dict[str, Any] | None = None  # what a sweep set in it, by key; None unless a sweep.json says so

    @property
    def compared(self) -> bool:
        """True for a row of the sweep, whose folder carries the strategy's name."""
        return self.folder.name == self.strategy

    @property
    def label(self) -> str:
        """How plots and tables call this run."""
        return self.strategy if self.compared else self.folder.name


class SweptRun(schema.Part):
    """One run of a sweep."""

    folder: str  # its name, below the sweep's
    strategy: str  # the accelerate file that it was launched with, without .yaml
    values: dict[str, Any]  # by key, in the order of the command line: what the sweep set


class SweepFile(schema.Part):
    """All runs of a folder whose values a sweep set, in the order in which they were to run."""

    schema_version: Literal[1] = Field(alias="schema")
    runs: list[SweptRun]  # those of earlier sweeps into the same folder among them


def draw_losses(axes: Any, run: schema.Metrics) -> None:
    """Losses of training and evaluation over the steps, on axes of matplotlib."""
    few, evaluated = len(run.losses) < 20, {entry.step: entry.loss for entry in run.eval_history or []}
    axes.plot([*run.losses], [*run.losses.values()], color="#33608c", lw=1.2, marker="." * few, label="training")
    if evaluated:
        axes.plot([*evaluated], [*evaluated.values()], color="#cc4b58", lw=1.6, marker="o", ms=5, label="evaluation")
    axes.set(xlabel="optimizer step", ylabel="loss")
    axes.locator_params(axis="x", integer=True)
    axes.legend(frameon=False)


def read_runs(folder: Path) -> list[MeasuredRun]:
    """Every run in `folder` and one level below: ddp and zero0 to zero3 first, then the others by name, at last those
    of a sweep of values in its order. What `--overwrite true` has kept is left out. Raises ContractError, which names
    the file, for one that cannot be read, and where there is none."""
    folder = Path(folder).resolve()  # "." has no name of its own, and names decide what is compared
    swept = {folder / run.folder: run.values for run in read_sweep_file(folder).runs}
    below = [file for file in sorted(folder.glob(f"*/{schema.FILE}")) if file.parent.suffix != ".previous"]
    runs = []
    for file in (file for file in (folder / schema.FILE, *below) if file.exists()):
        samples = read_samples(file.with_name("samples.jsonl"))
        found = {"folder": file.parent, "samples": samples, "swept": swept.get(file.parent)}
        runs.append(schema.read_part(MeasuredRun, file).model_copy(update=found))
    if not runs:
        raise schema.ContractError(f"no {schema.FILE} in {folder} or one level below it")
    listed, names = list(swept), list(schema.ORDER)

    def place(run: MeasuredRun) -> tuple[int, int, str]:
        number = names.index(run.strategy) if run.compared and run.strategy in names else len(names)
        return listed.index(run.folder) if run.folder in swept else -1, number, run.folder.name

    return sorted(runs, key=place)


def read_samples(file: Path) -> list[SampleRow]:
    """One SampleRow per line; an absent file means that no prompts were sampled."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    return [schema.parse_part(SampleRow, line, f"{file} line {number}") for number, line in enumerate(lines, start=1)]


def read_sweep_file(folder: Path) -> SweepFile:
    """The sweep.json of a folder, without runs where there is none. Raises ContractError, which names the file."""
    path = folder / SWEEP_FILE
    return schema.read_part(SweepFile, path) if path.exists() else SweepFile(schema=1, runs=[])


def add_to_sweep_file(folder: Path, added: list[SweptRun]) -> None:
    """A run in the folder of an earlier one takes its place. Raises ContractError."""
    runs = {run.folder: run for run in read_sweep_file(folder).runs + added}
    document = SweepFile(schema=1, runs=list(runs.values()))
    write_text(folder / SWEEP_FILE, document.model_dump_json(by_alias=True, indent=2) + "\n")
