"""From a folder of runs to the files and the lines in the terminal."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from zero_recipes.core.files import without_nan
from zero_recipes.core.findings import refusal
from zero_recipes.core.tables import plain, print_columns, terminal
from zero_recipes.metrics.read_runs import MeasuredRun, UnreadableRun, read_runs
from zero_recipes.metrics.schema import ContractError
from zero_recipes.report import plots, rows, table
from zero_recipes.report.judge import Judgement, judge_runs
from zero_recipes.report.page import devices_note, render_page

VERDICT_STYLE = {"yes": "bold green", "no": "bold red", "cannot tell": "bold yellow"}


def write_report(folder: Path, console: Console | None = None) -> Path:
    """Write report.html, report.json, report.md and the pictures into `folder`, print the tables and judgements.

    A metrics.json that cannot be read is a row that says why. Returns the path of the page. Raises Refusal where there
    is none that can be read.
    """
    folder = Path(folder)
    try:
        runs = read_runs(folder)
    except ContractError as error:
        raise refusal("ZR560", folder=folder, error=str(error)) from error
    judgements = judge_runs(runs)
    page = folder / "report.html"
    (folder / "report.json").write_text(_as_json(runs, judgements), encoding="utf-8")
    (folder / "report.md").write_text(_as_markdown(runs), encoding="utf-8")
    page.write_text(render_page(runs, judgements, _draw(runs, folder)), encoding="utf-8", errors="replace")
    _print(runs, judgements, console or terminal())
    return page


def _draw(runs: Sequence[MeasuredRun], folder: Path) -> dict[str, Path]:
    """All pictures by their file names' stems."""
    drawn = [*plots.draw_comparison(runs, folder).values()]
    drawn += [path for run in rows.single_runs(runs) if (path := plots.draw_single(run, folder))]
    for number, group in enumerate(rows.sweeps(runs), 1):
        name = "sweep.png" if number == 1 else f"sweep_{number}.png"
        drawn.append(plots.draw_sweep(table.sweep_table(group), folder / name))
    return {path.stem: path for path in drawn}


def _print(runs: Sequence[MeasuredRun], judgements: Sequence[Judgement], console: Console) -> None:
    for shown in table.tables(runs):
        console.print(plain(shown.title, style="bold"))
        print_columns(shown.named, shown.measured, shown.rows, console)
    for line in table.notes(runs):
        console.print(plain(line, style="dim"))
    if note := devices_note(runs):
        console.print(plain(note, style="yellow"))
    for judgement in judgements:
        console.print()
        console.print(plain(judgement.verdict, VERDICT_STYLE[judgement.verdict]), judgement.question, sep="  ")
        console.print(plain(judgement.measured))
    for run in runs:
        if run.samples_fault:
            console.print(plain(f"\n{run.label}: its samples cannot be read. {run.samples_fault}", style="red"))
        if run.status != "ok":
            console.print(plain(f"\n{run.label}: {run.status}. {run.error or ''}", style="red"))


def _as_json(runs: Sequence[MeasuredRun], judgements: Sequence[Judgement]) -> str:
    """Rows and judgements as strict JSON; bytes and seconds, nothing rounded."""
    reference = rows.baseline(runs)
    content = {
        "schema": 1,
        "baseline": reference.label if reference else None,
        "rows": rows.table_rows(runs),
        "judgements": [judgement._asdict() for judgement in judgements],
    }
    return json.dumps(without_nan(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _as_markdown(runs: Sequence[MeasuredRun]) -> str:
    """The tables for a README, each below the setting that it was measured in."""
    lines = table.notes(runs) + [note for note in [devices_note(runs)] if note]
    lines += [f"{run.label}: {run.status}. {run.error}" for run in runs if isinstance(run, UnreadableRun)]
    blocks = [f"{shown.title}\n\n{shown.markdown}" for shown in table.tables(runs)]
    return "\n".join([*blocks, *(f"- {line}" for line in lines)]) + "\n"
