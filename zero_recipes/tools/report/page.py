"""The report's files and its lines in the terminal.

The page is one HTML file that fetches nothing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console

from zero_recipes.core.files import write_json
from zero_recipes.core.findings import refusal
from zero_recipes.core.tables import plain, print_columns, terminal
from zero_recipes.metrics.read_runs import read_runs
from zero_recipes.metrics.schema import ContractError
from zero_recipes.tools.report import plots, read, tables
from zero_recipes.tools.report.content import content_of
from zero_recipes.tools.report.judge import Judgement, bottom_line, judge_runs
from zero_recipes.tools.report.read import Planned, Runs


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
    plan = read.planned(folder)
    content = {
        "schema": 1,
        "baseline": reference and reference.label,
        "rows": read.table_rows(runs),
        "bottom_line": " ".join(bottom_line(runs, plan)),
        "judgements": [judgement._asdict() for judgement in judgements],
    }
    write_json(folder / "report.json", content)
    page = folder / "report.html"
    page.write_text(render_page(runs, judgements, pictures, plan), encoding="utf-8", errors="replace")
    _print(runs, judgements, plan, console or terminal())
    return page


def _print(runs: Runs, judgements: Sequence[Judgement], plan: Planned | None, console: Console) -> None:
    for line in bottom_line(runs, plan):
        console.print(plain(f"- {line}", style="bold"))
    for table in tables.tables_of(runs):
        console.print(plain(f"\n{table.title}", style="bold"))
        print_columns(table.named, table.measured, table.rows, console)
    for line in tables.notes(runs):
        console.print(plain(line, style="dim"))
    for judgement in judgements:
        console.print(plain(f"\n{judgement.question} {judgement.verdict}", style="bold"))
        console.print(plain(judgement.measured))
    for run in runs:
        if run.status != "ok":
            console.print(plain(f"\n{run.label}: {run.status}. {run.error or ''}", style="red"))


def render_page(
    runs: Runs, judgements: Sequence[Judgement], pictures: Mapping[str, Path], plan: Planned | None = None
) -> str:
    """Write the page. `pictures`: of the comparison, by name. `plan`: of the same job on GPUs."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(content_of(runs, judgements, pictures, plan))
