"""The report as one HTML file: pictures embedded, style inline, nothing fetched from anywhere."""

import base64
import json
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from zero_recipes.core import units
from zero_recipes.metrics.parts import PhaseSeconds
from zero_recipes.metrics.read_runs import MeasuredRun, SampleRow
from zero_recipes.report import rows, swept, table
from zero_recipes.report.answers import mean_scores, sampled_run
from zero_recipes.report.judgement import Judgement

SHOWN_SAMPLES = 12
ALT = {
    "staircase": "Bars: bytes of parameters, gradients and optimizer on one rank, for each strategy",
    "throughput": "Bars: tokens per second of each strategy",
    "plan": "Bars: planned memory of each strategy by parts, beside the measured peak, and the GPU's memory",
    "phases": "Bars: seconds of each phase of each run",
    "loss": "Lines: training loss of each strategy, and its distance to the baseline",
}


def render_page(
    runs: Sequence[MeasuredRun],
    judgements: Sequence[Judgement],
    pictures: dict[str, Path],
    single_pictures: dict[str, Path],
    sweep_pictures: Sequence[Path] = (),
) -> str:
    """The whole page as text. `pictures` by name, `single_pictures` by the folder name of the single run,
    `sweep_pictures` by swept.groups."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    compared = rows.comparison(runs)
    return environment.get_template("page.html.j2").render(
        setting=rows.setting(compared or runs),
        written=date.today().isoformat(),
        devices=devices_note(runs),
        judgements=judgements,
        comparison=_tables(rows.table_rows(compared)),
        notes=notes(runs),
        sweeps=[_sweep(group, path) for group, path in zip(swept.groups(runs), sweep_pictures, strict=True)],
        pictures=[{"alt": ALT[name], "data": _embedded(path)} for name, path in pictures.items()],
        singles=[_single(run, single_pictures.get(run.folder.name)) for run in rows.single_runs(runs)],
        failures=[_failure(run) for run in runs if run.status != "ok" or run.samples_fault],
        answers=_answers(sampled_run(runs)),
        details=[_phases(runs), _predicted(runs), *_shared("Versions", runs, "versions"), *_settings(runs)],
    )


def notes(runs: Sequence[MeasuredRun]) -> list[str]:
    """What a reader needs to know about the columns of all tables."""
    others = rows.table_rows([run for run in runs if run.swept is None])
    lines = table.notes(others) if others else []
    lines += [line for group in swept.groups(runs) for line in swept.notes(rows.table_rows(group))]
    return list(dict.fromkeys(lines))


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


def _tables(chosen: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One table on memory and one on speed and loss: together they are too wide for a page."""
    if not chosen:
        return []
    named, memory, speed = table.report_columns(chosen)
    return [
        {
            "headers": [column.header.replace("\n", " ") for column in named + part],
            "rows": [[column.cell(row) for column in named + part] for row in chosen],
        }
        for part in ([part for part in (memory, speed) if part] or [[]])
    ]


def _sweep(group: Sequence[MeasuredRun], picture: Path) -> dict[str, Any]:
    chosen = rows.table_rows(group)
    named, others = swept.columns(chosen)
    return {
        "title": swept.title(group),
        "named": len(named),
        "table": {
            "headers": [column.header.replace("\n", " ") for column in named + others],
            "rows": [[column.cell(row) for column in named + others] for row in chosen],
        },
        "picture": _embedded(picture),
    }


def _single(run: MeasuredRun, picture: Path | None) -> dict[str, Any]:
    return {
        "title": "Full run" if run.folder.name == "full" else f"Run {run.folder.name}",
        "setting": f"{rows.setting([run])}, strategy {run.strategy}",
        "tables": _tables(rows.table_rows([run])),
        "picture": _embedded(picture) if picture else None,
        "evaluations": [(entry.step, units.fixed(entry.loss, 4)) for entry in run.eval_history or []],
    }


def _failure(run: MeasuredRun) -> dict[str, Any]:
    """What is known about a run that did not finish, in the order in which a reader asks."""
    details = run.failure
    where = []
    if details:
        where = [
            ("phase", details.phase),
            ("rank", details.rank),
            ("signal", details.signal),
        ]
    return {
        "label": run.label,
        "status": run.status,
        "error": run.error or run.samples_fault or "no message",
        "where": [(name, value) for name, value in where if value is not None],
        "memory": [(held.what, units.size(held.bytes)) for held in details.largest_memory] if details else [],
        "cures": details.cures if details else [],
    }


def _answers(run: MeasuredRun | None) -> dict[str, Any] | None:
    """The first prompts with both answers and all scores, and the mean scores over all prompts."""
    if run is None:
        return None
    means = mean_scores(run.samples)
    return {
        "label": run.label,
        "total": len(run.samples),
        "samples": [_sample(sample) for sample in run.samples[:SHOWN_SAMPLES]],
        "means": [(name, f"{before:.3f}", f"{after:.3f}") for name, (before, after) in means.items()],
    }


def _sample(sample: SampleRow) -> dict[str, Any]:
    names = dict.fromkeys((*sample.scores_before, *sample.scores_after))
    return {
        "prompt": sample.prompt,
        "before": sample.before if sample.before is not None else "(no answer)",
        "after": sample.after if sample.after is not None else "(no answer)",
        "reference": sample.reference or "",
        "scores": [
            (name, units.fixed(sample.scores_before.get(name), 3), units.fixed(sample.scores_after.get(name), 3))
            for name in names
        ],
    }


# ---------------------------------------------------------------- details of the runs


def _phases(runs: Sequence[MeasuredRun]) -> dict[str, Any]:
    timed = [run for run in runs if run.phase_seconds]
    names = [
        name for name in PhaseSeconds.model_fields if any(name in run.phase_seconds.model_fields_set for run in timed)
    ]
    lines = [[run.label, *(_seconds(getattr(run.phase_seconds, name)) for name in names)] for run in timed]
    return {"title": "Seconds per phase", "headers": ["run", *names], "rows": lines}


def _predicted(runs: Sequence[MeasuredRun]) -> dict[str, Any]:
    """What was planned beside what was measured: states with states, allocated peak with allocated peak."""
    lines = []
    for run in runs:
        rank = rows.largest_rank(run)
        states = rows.planned_states(run), rows.state_total(rank) if rank else None
        peaks = rows.planned_peak(run), rows.peak_allocated(run)
        if states[0] is not None or peaks[0] is not None:
            lines.append([run.label, run.predicted.source or "", *_beside(*states), *_beside(*peaks)])
    return {
        "title": "Planned and measured memory",
        "headers": ["run", "planned by", "states planned", "measured", "apart", "peak planned", "measured", "apart"],
        "rows": lines,
    }


def _beside(planned: int | None, measured: int | None) -> tuple[str, str, str]:
    apart = units.percent(planned / measured - 1) if planned is not None and measured else ""
    return units.size(planned), units.size(measured), apart


def _shared(title: str, runs: Sequence[MeasuredRun], key: str) -> Iterable[dict[str, Any]]:
    """One table per distinct content of a field, naming the runs that share it."""
    groups: dict[str, tuple[dict[str, Any], list[MeasuredRun]]] = {}
    for run in runs:
        if content := run.model_dump(include={key}, exclude_unset=True).get(key):
            groups.setdefault(json.dumps(content, sort_keys=True), (content, []))[1].append(run)
    for content, members in groups.values():
        names = "" if len(groups) == 1 else f" of {', '.join(run.label for run in members)}"
        lines = [[name, _plain(name, value)] for name, value in content.items()]
        yield {"title": title + names, "headers": [], "rows": lines}


def _settings(runs: Sequence[MeasuredRun]) -> Iterable[dict[str, Any]]:
    yield from _shared("Hardware", runs, "hardware")
    lines = [
        [run.label, *("" if value is None else str(value) for value in values)]
        for run in runs
        if any(values := _setting_values(run))
    ]
    yield {
        "title": "Settings",
        "headers": ["run", "model", "parameters", "trainable", "device", "ranks", "precision", "micro batch",
                    "accumulation", "max length", "steps", "recipe"],
        "rows": lines,
    }  # fmt: skip


def _setting_values(run: MeasuredRun) -> tuple[Any, ...]:
    return (
        run.model, run.parameters and f"{run.parameters:,}",
        run.trainable_parameters and f"{run.trainable_parameters:,}", run.device, run.world_size, run.precision,
        run.micro_batch_size, run.gradient_accumulation_steps, run.max_length, len(run.loss_history or []) or None,
        run.recipe_sha256 and run.recipe_sha256[:12],
    )  # fmt: skip


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _plain(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return units.size(value)
    return value if isinstance(value, str) else json.dumps(value)


def _embedded(picture: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode("ascii")
