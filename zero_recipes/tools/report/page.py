"""From a folder of runs to the report's files and the lines in the terminal.

The page is one HTML file: pictures embedded, style inline, nothing fetched from anywhere.
"""

import base64
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console

from zero_recipes.core import units
from zero_recipes.core.files import write_json
from zero_recipes.core.findings import refusal
from zero_recipes.core.tables import Column, plain, print_columns, terminal
from zero_recipes.metrics.read_runs import MeasuredRun, mean_scores, question, read_runs
from zero_recipes.metrics.schema import ContractError
from zero_recipes.tools.report import plots, read
from zero_recipes.tools.report.judge import Judgement, bottom_line, judge_runs, sampled_run

PICTURE = "loss.png"  # that a run draws for its model card
VERDICT_STYLE = {"yes": "bold green", "no": "bold red", "cannot tell": "bold yellow"}


def write_report(folder: Path, console: Console | None = None) -> Path:
    """Write report.html, report.json and the pictures into `folder`, print the tables and judgements.
    Returns the path of the page. Raises Refusal where a metrics.json cannot be read, or there is none."""
    try:
        runs = read_runs(folder)
    except ContractError as error:
        raise refusal("ZR560", folder=folder, error=str(error)) from error
    judgements = judge_runs(runs)
    pictures = plots.draw_comparison(runs, folder)
    page = folder / "report.html"
    reference, answers = read.baseline(runs), [judgement._asdict() for judgement in judgements]
    found = {"schema": 1, "baseline": reference and reference.label, "rows": read.table_rows(runs)}
    write_json(folder / "report.json", found | {"bottom_line": bottom_line(runs), "judgements": answers})
    page.write_text(render_page(runs, judgements, pictures), encoding="utf-8", errors="replace")
    _print(runs, judgements, console or terminal())
    return page


def _print(runs: Sequence[MeasuredRun], judgements: Sequence[Judgement], console: Console) -> None:
    console.print(plain(bottom_line(runs), style="bold"))
    for shown in read.tables(runs):
        console.print(plain(f"\n{shown.title}", style="bold"))
        print_columns(shown.named, shown.measured, shown.rows, console)
    for line in read.notes(runs):
        console.print(plain(line, style="dim"))
    for judgement in judgements:
        console.print()
        console.print(plain(judgement.verdict, VERDICT_STYLE[judgement.verdict]), judgement.question, sep="  ")
        console.print(plain(judgement.measured))
    for run in runs:
        if run.status != "ok":
            console.print(plain(f"\n{run.label}: {run.status}. {run.error or ''}", style="red"))


def render_page(runs: Sequence[MeasuredRun], judgements: Sequence[Judgement], pictures: Mapping[str, Path]) -> str:
    """The whole page as text. `pictures`: of the comparison, by name. A single run has its own loss.png."""
    loader, blocks = FileSystemLoader(Path(__file__).parent), {"trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, **blocks)
    in_base64 = lambda path: base64.b64encode(path.read_bytes()).decode()  # noqa: E731
    environment.filters |= {"size": units.size, "fixed": units.fixed, "base64": in_base64, "question": question}
    compared, answered, swept = read.comparison(runs), sampled_run(runs), map(read.sweep_table, read.sweeps(runs))
    return environment.get_template("page.html.j2").render(
        setting=read.setting(compared or runs),
        written=date.today().isoformat(),
        bottom_line=bottom_line(runs),
        judgements=judgements,
        comparison=_grids(read.runs_table(compared)) if compared else [],
        notes=read.notes(runs),
        sweeps=[(shown, _grid(shown.named + shown.measured, shown.rows)) for shown in swept],
        pictures=pictures,
        singles=[(run, _grids(read.runs_table([run])), run.folder / PICTURE) for run in read.single_runs(runs)],
        failures=[run for run in runs if run.status != "ok"],
        answered=answered,
        means=mean_scores(answered.samples) if answered else {},
    )


def _grids(shown: read.Table) -> list[dict[str, Any]]:
    """One table on memory and one on speed and loss: together they are too wide for a page."""
    parts = [part for part in (shown.memory, shown.speed) if part] or [[]]
    return [_grid(shown.named + part, shown.rows) for part in parts]


def _grid(columns: Sequence[Column], chosen: Sequence[Any]) -> dict[str, Any]:
    headers = [column.header.replace("\n", " ") for column in columns]
    return {"headers": headers, "rows": [[column.cell(row) for column in columns] for row in chosen]}
