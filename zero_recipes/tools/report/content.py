"""What the report's page shows, ready to be written: texts, tables and pictures. The template only places them."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from zero_recipes.core import units
from zero_recipes.core.tables import Column
from zero_recipes.metrics.read_runs import MeasuredRun, SampleRow, mean_scores, question
from zero_recipes.tools.report import read, tables
from zero_recipes.tools.report.judge import Judgement, bottom_line, sampled_run
from zero_recipes.tools.report.read import Planned, Runs
from zero_recipes.tools.report.tables import Table

# answers that are shown at once, and those behind a click
FIRST_ANSWERS = 3
MOST_ANSWERS = 12
# pictures of the comparison, with what a reader hears who does not see them
PICTURES = {
    "staircase": "Bars: bytes of parameters, gradients and optimizer on one rank, for each strategy",
    "speed": "Bars: tokens per second of each strategy",
    "loss": "Lines: training loss of each strategy",
}
OF_A_RUN = "Lines: training and evaluation loss of this run"


class Cell(NamedTuple):
    """A cell of a table."""

    text: str
    is_number: bool = True


class Grid(NamedTuple):
    """A table of the page."""

    head: list[Cell]
    rows: list[list[Cell]]


class Picture(NamedTuple):
    """A PNG file within the page."""

    base64: str
    alt: str


class Answered(NamedTuple):
    """A prompt with its answers."""

    prompt: str
    texts: list[tuple[str, str]]  # (Before, After or Reference; the text)
    scores: list[tuple[str, str]]  # (metric, before and after)


@dataclass(frozen=True)
class Answers:
    """The answers of one run."""

    title: str
    means: Grid | None
    first: list[Answered]
    others: list[Answered]


class Failure(NamedTuple):
    """A run that did not finish."""

    title: str
    where: str  # phase, rank and signal
    error: str
    memory: list[str]  # its largest uses


@dataclass(frozen=True)
class SingleRun:
    """A run that is compared with none."""

    title: str
    strategy: str
    grids: list[Grid]
    picture: Picture | None
    evaluations: Grid | None


def content_of(
    runs: Runs, judgements: Sequence[Judgement], pictures: Mapping[str, Path], plan: Planned | None = None
) -> dict[str, Any]:
    """The values of page.html.j2. `pictures`: of the comparison, by name. A single run has its own loss.png.

    `plan`: of the same job on GPUs.
    """
    compared = read.comparison(runs)
    swept = [tables.sweep_table(group) for group in read.sweeps(runs)]
    return {
        "setting": read.setting(compared or runs),
        "written": date.today().isoformat(),
        "bottom_line": bottom_line(runs, plan),
        "answers": _answers(sampled_run(runs)),
        "pictures": [_picture(pictures[name], alt) for name, alt in PICTURES.items() if name in pictures],
        "judgements": judgements,
        "failures": [_failure(run) for run in runs if run.status != "ok"],
        "comparison": _halves(tables.runs_table(compared)) if compared else [],
        "sweeps": [(table.title, _grid(table.named, table.measured, table.rows)) for table in swept],
        "notes": tables.notes(runs),
        "single_runs": [_single_run(run) for run in read.single_runs(runs)],
    }


def _grid(named: Sequence[Column], measured: Sequence[Column], rows: Sequence[Any]) -> Grid:
    """The columns with numbers come after those that name the row."""
    columns = [(column, False) for column in named] + [(column, True) for column in measured]
    head = [Cell(column.header.replace("\n", " "), is_number) for column, is_number in columns]
    cells = [[Cell(column.cell(row), is_number) for column, is_number in columns] for row in rows]
    return Grid(head, cells)


def _halves(table: Table) -> list[Grid]:
    """One table on memory and one on speed and loss: together they are too wide for a page."""
    halves = [columns for columns in (table.memory, table.speed) if columns]
    return [_grid(table.named, columns, table.rows) for columns in halves or [[]]]


def _picture(path: Path, alt: str) -> Picture:
    return Picture(base64.b64encode(path.read_bytes()).decode(), alt)


def _answers(run: MeasuredRun | None) -> Answers | None:
    if run is None:
        return None
    count = len(run.samples)
    title = f"{count} prompts, answered before and after the run named {run.label}"
    if count > MOST_ANSWERS:
        title += f"; the first {MOST_ANSWERS} are shown"
    rows = []
    for name, (before, after, _) in mean_scores(run.samples).items():
        rows.append([Cell(name, is_number=False), Cell(units.fixed(before, 3)), Cell(units.fixed(after, 3))])
    head = [Cell("mean score, all prompts", is_number=False), Cell("before"), Cell("after")]
    answered = [_answered(sample) for sample in run.samples[:MOST_ANSWERS]]
    means = Grid(head, rows) if rows else None
    return Answers(f"{title}.", means, answered[:FIRST_ANSWERS], answered[FIRST_ANSWERS:])


def _answered(sample: SampleRow) -> Answered:
    answers = {"Before": sample.before, "After": sample.after, "Reference": sample.reference or ""}
    texts = [(head, "(no answer)" if text is None else text) for head, text in answers.items()]
    scores = []
    for name, after in sample.scores_after.items():
        before = sample.scores_before.get(name)
        scores.append((name, f"{units.fixed(before, 3)}, {units.fixed(after, 3)}"))
    return Answered(question(sample.prompt), texts, scores)


def _failure(run: MeasuredRun) -> Failure:
    failure = run.failure
    where = []
    memory = []
    if failure:
        if failure.phase:
            where.append(f"phase {failure.phase}")
        if failure.rank is not None:
            where.append(f"rank {failure.rank}")
        if failure.signal:
            where.append(f"signal {failure.signal}")
        memory = [f"{part}: {units.size(taken)}" for part, taken in (failure.largest_memory or {}).items()]
    return Failure(f"{run.label}: {run.status}", ", ".join(where), run.error or "no message", memory)


def _single_run(run: MeasuredRun) -> SingleRun:
    drawn = run.folder / "loss.png"
    evaluations = None
    if run.eval_history:
        rows = [[Cell(str(entry.step)), Cell(units.fixed(entry.loss, 4))] for entry in run.eval_history]
        evaluations = Grid([Cell("after step"), Cell("loss")], rows)
    return SingleRun(
        title="Full run" if run.folder.name == "full" else f"Run {run.folder.name}",
        strategy=run.strategy,
        grids=_halves(tables.runs_table([run])),
        picture=_picture(drawn, OF_A_RUN) if drawn.is_file() else None,
        evaluations=evaluations,
    )
