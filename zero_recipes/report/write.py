"""From a folder of runs to the files and the lines in the terminal."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from zero_recipes.core.files import without_nan
from zero_recipes.core.findings import first_line, refusal
from zero_recipes.core.tables import Column, Row, markdown_columns, plain, print_columns, terminal
from zero_recipes.metrics.read_runs import MeasuredRun, UnreadableRun, read_what_can_be_read
from zero_recipes.metrics.schema import ContractError
from zero_recipes.metrics.sweep_file import SWEEP_FILE, read_sweep_file
from zero_recipes.report import phases_plot, plan_plot, plots, rows, sweep_plot, swept, table
from zero_recipes.report.judgement import Judgement, judge_runs
from zero_recipes.report.page import devices_note, notes, render_page

VERDICT_STYLE = {"yes": "bold green", "no": "bold red", "cannot tell": "bold yellow"}


def write_report(folder: Path, console: Console | None = None) -> Path:
    """Write report.html, report.json, report.md and the pictures into `folder`, print the tables and judgements.

    A metrics.json that cannot be read is a row that says why. Returns the path of the page. Raises Refusal where there
    is none that can be read, and where nothing can be written.
    """
    folder = Path(folder)
    try:
        read_sweep_file(folder)
    except ContractError as error:
        raise refusal("ZR362", folder=folder / SWEEP_FILE, error=str(error)) from error
    try:
        runs = read_what_can_be_read(folder)
    except ContractError as error:
        fix = "Name the output_dir of a run, or the folder of a sweep."
        raise refusal("ZR560", folder=folder, error=str(error), fix=fix) from error
    try:
        return _write_all(runs, folder, console or terminal())
    except OSError as error:
        raise refusal("ZR561", folder=folder, error=first_line(error)) from error


def _write_all(runs: Sequence[MeasuredRun], folder: Path, console: Console) -> Path:
    judgements = judge_runs(runs)
    pictures = plots.draw_comparison(runs, folder) | _plan_picture(runs, folder) | _phases_picture(runs, folder)
    drawn = {run.folder.name: plots.draw_single(run, folder) for run in rows.single_runs(runs)}
    single_pictures = {name: path for name, path in drawn.items() if path}
    sweep_pictures = _sweep_pictures(runs, folder)
    _write(folder / "report.json", _as_json(runs, judgements))
    _write(folder / "report.md", _as_markdown(runs))
    page = _write(folder / "report.html", render_page(runs, judgements, pictures, single_pictures, sweep_pictures))
    print_report(runs, judgements, console)
    return page


def _sweep_pictures(runs: Sequence[MeasuredRun], folder: Path) -> list[Path]:
    """sweep.png, and sweep_2.png and so on where the runs of several sweeps lie in the folder."""
    paths = []
    for number, group in enumerate(swept.groups(runs), 1):
        path = folder / ("sweep.png" if number == 1 else f"sweep_{number}.png")
        paths.append(sweep_plot.draw(rows.table_rows(group), rows.setting(group), path))
    return paths


def _plan_picture(runs: Sequence[MeasuredRun], folder: Path) -> dict[str, Path]:
    """plan.png: what was planned for the runs of the comparison, with the peaks that an accelerator measured."""
    planned = [run for run in rows.comparison(runs) if _has_bars(run)]
    if not planned:
        return {}
    bars = [_bar(run) for run in planned]
    memory = [run.hardware.gpu_memory_bytes for run in planned if run.hardware and run.hardware.gpu_memory_bytes]
    title, setting = "Planned memory, and the measured peak", rows.setting(planned)
    return {"plan": plan_plot.draw(bars, min(memory, default=None), title, setting, folder / "plan.png")}


def _phases_picture(runs: Sequence[MeasuredRun], folder: Path) -> dict[str, Path]:
    """phases.png: where the seconds of every run went."""
    drawn = phases_plot.draw(runs, rows.setting(rows.comparison(runs) or runs), folder / "phases.png")
    return {} if drawn is None else {"phases": drawn}


def _has_bars(run: MeasuredRun) -> bool:
    return bool(rows.planned_peak(run) and run.predicted.at_peak and run.predicted.reserved_bytes)


def _bar(run: MeasuredRun) -> plan_plot.Bar:
    reserved = run.predicted.reserved_bytes
    return plan_plot.Bar(run.label, run.predicted.at_peak, (reserved.low, reserved.high), rows.peak_allocated(run))


def print_report(runs: Sequence[MeasuredRun], judgements: Sequence[Judgement], console: Console) -> None:
    """The tables and the judgements for the terminal."""
    for title, named, others, chosen in _tables(runs):
        console.print(Text(title, style="bold"))
        print_columns(named, others, chosen, console)
    for line in notes(runs):
        console.print(Text(line, style="dim"))
    if note := devices_note(runs):
        console.print(Text(note, style="yellow"))
    for judgement in judgements:
        heading = Text.assemble("\n", (judgement.verdict, VERDICT_STYLE[judgement.verdict]), "  ", judgement.question)
        console.print(heading)
        console.print(Text(judgement.measured))
    for run in runs:
        if run.samples_fault:
            console.print(Text(f"\n{run.label}: its samples cannot be read. {run.samples_fault}", style="red"))
        if run.status != "ok":
            console.print(plain(f"\n{run.label}: {run.status}. {run.error or ''}", style="red"))
            for fix in run.failure.cures if run.failure else []:
                console.print(plain(f"  may help: {fix}"))


def _tables(runs: Sequence[MeasuredRun]) -> list[tuple[str, list[Column], list[Column], list[Row]]]:
    """(title, columns that name the row, others, rows) of comparison, sweeps and single runs; empty ones are left
    out."""
    tables = []
    for title, group in (("Comparison", rows.comparison(runs)), ("Single runs", rows.single_runs(runs))):
        if group:
            chosen = rows.table_rows(group)
            named, memory, speed = table.report_columns(chosen)
            tables.append((f"{title}: {rows.setting(group)}", named, memory + speed, chosen))
    for group in swept.groups(runs):
        chosen = rows.table_rows(group)
        tables.append((swept.title(group), *swept.columns(chosen), chosen))
    return tables


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
    blocks = [f"{title}\n\n{markdown_columns(named, others, chosen)}" for title, named, others, chosen in _tables(runs)]
    lines = notes(runs) + [note for note in [devices_note(runs)] if note]
    lines += [f"{run.label}: {run.status}. {run.error}" for run in runs if isinstance(run, UnreadableRun)]
    return "\n".join([*blocks, *(f"- {line}" for line in lines)]) + "\n"


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", errors="replace")
    return path
