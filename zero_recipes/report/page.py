"""The report as one HTML file: pictures embedded, style inline, nothing fetched from anywhere."""

import base64
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from zero_recipes.core import units
from zero_recipes.core.tables import Column
from zero_recipes.metrics.read_runs import MeasuredRun
from zero_recipes.report import rows, table
from zero_recipes.report.judge import Judgement, mean_scores, sampled_run

SETTINGS = ("model", "parameters", "trainable_parameters", "device", "world_size", "precision", "micro_batch_size",
            "gradient_accumulation_steps", "max_length", "recipe_sha256")  # fmt: skip
PLANNED = ("run", "planned by", "states planned", "measured", "apart", "peak planned", "measured", "apart")


def render_page(runs: Sequence[MeasuredRun], judgements: Sequence[Judgement], pictures: Mapping[str, Path]) -> str:
    """The whole page as text. `pictures` by name: of the comparison, "run_<folder>" and "sweep", "sweep_2", ..."""
    loader, blocks = FileSystemLoader(Path(__file__).parent), {"trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, **blocks)
    environment.filters |= {"size": units.size, "fixed": units.fixed, "embedded": _embedded}
    compared, answered, swept = rows.comparison(runs), sampled_run(runs), map(table.sweep_table, rows.sweeps(runs))
    return environment.get_template("page.html.j2").render(
        setting=rows.setting(compared or runs),
        written=date.today().isoformat(),
        devices=devices_note(runs),
        judgements=judgements,
        comparison=_grids(table.runs_table(compared)) if compared else [],
        notes=table.notes(runs),
        sweeps=[(shown, _grid(shown.named + shown.measured, shown.rows)) for shown in swept],
        pictures=pictures,
        singles=[(run, _grids(table.runs_table([run]))) for run in rows.single_runs(runs)],
        failures=[run for run in runs if run.status != "ok" or run.samples_fault],
        answered=answered,
        means=mean_scores(answered.samples) if answered else {},
        details=_details(runs),
    )


def devices_note(runs: Sequence[MeasuredRun]) -> str | None:
    """A sentence on the rows that no GPU produced; None where all of them ran on one."""
    on_cpu = [run.label for run in runs if run.device == "cpu"]
    if not on_cpu:
        return None
    if len(on_cpu) == sum(run.device is not None for run in runs):
        which = "No number on this page was measured on a GPU: all runs used CPU processes."
    else:
        which = f"These rows were not measured on a GPU but on CPU processes: {', '.join(on_cpu)}."
    return f"{which} Model-state bytes carry over to GPUs; times and peak memory do not."


def _grids(shown: table.Table) -> list[dict[str, Any]]:
    """One table on memory and one on speed and loss: together they are too wide for a page."""
    parts = [part for part in (shown.memory, shown.speed) if part] or [[]]
    return [_grid(shown.named + part, shown.rows) for part in parts]


def _grid(columns: Sequence[Column], chosen: Sequence[Any]) -> dict[str, Any]:
    headers = [column.header.replace("\n", " ") for column in columns]
    return {"headers": headers, "rows": [[column.cell(row) for column in columns] for row in chosen]}


def _details(runs: Sequence[MeasuredRun]) -> list[dict[str, Any]]:
    """Tables at the end of the page: what each run took, was planned to take, and ran with."""
    planned = list(filter(None, map(_planned, runs)))
    return [
        {"title": "Planned and measured memory", "headers": PLANNED, "rows": planned},
        _by_run("Seconds per phase", {run.label: run.phase_seconds and run.phase_seconds.model_dump() for run in runs}),
        _by_run("Settings", {run.label: {name: getattr(run, name) for name in SETTINGS} for run in runs}),
        _by_run("Hardware", {run.label: run.hardware and run.hardware.model_dump() for run in runs}),
        _by_run("Versions", {run.label: run.versions for run in runs}),
    ]


def _planned(run: MeasuredRun) -> list[str] | None:
    """What was planned beside what was measured: states with states, allocated peak with allocated peak."""
    rank, cells = rows.largest_rank(run), []
    states = rows.planned_states(run), rows.state_total(rank) if rank else None
    peaks = rows.planned_peak(run), rows.peak_allocated(run)
    if states[0] is None and peaks[0] is None:
        return None
    for planned, measured in (states, peaks):
        apart = units.percent(planned / measured - 1) if planned is not None and measured else ""
        cells += [units.size(planned), units.size(measured), apart]
    return [run.label, run.predicted.source or "", *cells]


def _by_run(title: str, of: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    """A line a key and a column a run, one column where all runs agree. `of`: {run: content}."""
    known = {label: content for label, content in of.items() if content}
    if len(known) > 1 and all(content == next(iter(known.values())) for content in known.values()):
        known = {"all runs": next(iter(known.values()))}
    keys = dict.fromkeys(key for content in known.values() for key in content)
    lines = [[key, *(_plain(key, content.get(key)) for content in known.values())] for key in keys]
    return {"title": title, "headers": ["", *known], "rows": [line for line in lines if any(line[1:])]}


def _plain(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int):
        return units.size(value) if name.endswith("_bytes") else f"{value:,}"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _embedded(picture: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode("ascii")
