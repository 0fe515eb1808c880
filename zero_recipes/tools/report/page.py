"""The report's files and its lines in the terminal.

The page is one HTML file that fetches nothing.
"""

import base64
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console

from zero_recipes.core import units
from zero_recipes.core.files import write_json
from zero_recipes.core.findings import refusal
from zero_recipes.core.tables import plain, print_columns, terminal
from zero_recipes.metrics.read_runs import mean_scores, question, read_runs
from zero_recipes.metrics.schema import ContractError
from zero_recipes.tools.report import plots, read
from zero_recipes.tools.report.judge import Judgement, bottom_line, judge_runs, sampled_run
from zero_recipes.tools.report.read import Runs


def write_report(folder: Path, console: Console | None = None) -> Path:
    """Write report.html, report.json and the pictures into `folder`, and print the tables.

    Returns the page's path.
    Raises Refusal if a metrics.json cannot be read, or there is none.
    """
    try:
        runs = read_runs(folder)
    except ContractError as error:
        raise refusal("ZR560", folder=folder, error=str(error)) from error
    judgements = judge_runs(runs)
    pictures = plots.draw_comparison(runs, folder)
    reference = read.baseline(runs)
    content = {
        "schema": 1,
        "baseline": reference and reference.label,
        "rows": read.table_rows(runs),
        "bottom_line": " ".join(bottom_line(runs)),
        "judgements": [judgement._asdict() for judgement in judgements],
    }
    write_json(folder / "report.json", content)
    page = folder / "report.html"
    page.write_text(render_page(runs, judgements, pictures), encoding="utf-8", errors="replace")
    _print(runs, judgements, console or terminal())
    return page


def _print(runs: Runs, judgements: Sequence[Judgement], console: Console) -> None:
    for line in bottom_line(runs):
        console.print(plain(f"- {line}", style="bold"))
    for table in read.tables(runs):
        console.print(plain(f"\n{table.title}", style="bold"))
        print_columns(table.named, table.measured, table.rows, console)
    for line in read.notes(runs):
        console.print(plain(line, style="dim"))
    for judgement in judgements:
        console.print(plain(f"\n{judgement.question} {judgement.verdict}", style="bold"))
        console.print(plain(judgement.measured))
    for run in runs:
        if run.status != "ok":
            console.print(plain(f"\n{run.label}: {run.status}. {run.error or ''}", style="red"))


def render_page(runs: Runs, judgements: Sequence[Judgement], pictures: Mapping[str, Path]) -> str:
    """`pictures`: of the comparison, by name. A single run has its own loss.png."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"size": units.size, "fixed": units.fixed, "base64": _in_base64, "question": question}
    answered = sampled_run(runs)
    return environment.get_template("page.html.j2").render(
        read=read,
        runs=runs,
        compared=read.comparison(runs),
        written=date.today().isoformat(),
        bottom_line=bottom_line(runs),
        judgements=judgements,
        pictures=pictures,
        answered=answered,
        means=mean_scores(answered.samples) if answered else {},
    )


def _in_base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
