"""The pictures of the report. Sizes in bytes come in, PNG files go out.

Figures are built without pyplot: nothing global is touched and no display is looked for.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from zero_recipes.core import units
from zero_recipes.metrics.read_runs import MeasuredRun
from zero_recipes.tools.report import read

BARS_INCHES = (8.0, 4.8)
DPI = 150
INK, PALE, ALARM = "#24292f", "#57606a", "#b3261e"
STYLE = Path(__file__).with_name("style.mplstyle")
STRATEGIES = {"ddp": "#7a7a7a", "zero0": "#cc4b58", "zero1": "#e0a030", "zero2": "#2a9d8f", "zero3": "#33608c"}
OTHERS = ("#8e5ea2", "#a0642e", "#7fa653", "#c77cb0", "#4f4f87")
# parts of a stack, from the bottom to the top: colour and name
STATES = {
    "params": ("#4477aa", "params"),
    "grads": ("#ee9b3d", "grads"),
    "optimizer": ("#66a182", "optimizer"),
    "offloaded_host": ("#c3cad3", "on host"),
    "offloaded_disk": ("#e3d9c6", "on disk"),
}
ABSENT = {"oom": "out of memory", "ok": "not measured"}  # why there is no bar, by status


def draw_comparison(runs: Sequence[MeasuredRun], folder: Path) -> dict[str, Path]:
    """Write the pictures of the comparison, by name; none where there is nothing to compare."""
    compared = read.comparison(runs)
    if not compared:
        return {}
    setting = read.setting(compared)
    return {
        "staircase": _draw_states(compared, setting, folder / "staircase.png"),
        "throughput": _draw_throughput(compared, setting, folder / "throughput.png"),
        "loss": _draw_losses(compared, setting, folder / "loss.png"),
    }


def _draw_states(runs: Sequence[MeasuredRun], setting: str, path: Path) -> Path:
    """A stack of the model states of each run's fullest rank, with the measured peak beside it. In grey on top: what is
    on host and disk; a mark across the stack: the textbook's total."""
    peaks = [run.peak("allocated") or 0 for run in runs]
    totals = [sum(_states(run).values()) for run in runs]
    highest = max(*peaks, *totals, *(read.textbook(run) or 0 for run in runs))
    unit, one = units.unit_of(highest)
    written = lambda size: units.significant(size / one) if size >= one else units.size(size)  # noqa: E731
    width, shift = (0.4, 0.21) if any(peaks) else (0.56, 0.0)
    with _figure(path, BARS_INCHES) as figure:
        axes = _titled(figure.subplots(), "Model states on the fullest rank", setting)
        axes.set(ylabel=f"memory of the fullest rank in {unit}", ylim=(0, 1.12 * highest / one or 1))
        legend: dict[str, Any] = {}
        for place, run in enumerate(runs):
            left = place - shift if peaks[place] else place
            bottom = 0.0
            for part, size in _states(run).items():
                colour, name = STATES[part]
                looks = {"color": colour, "edgecolor": "white", "linewidth": 0.6}
                legend[name] = axes.bar(left, size / one, width, bottom, **looks)
                bottom += size / one
            textbook = read.textbook(run)
            if textbook:
                outline = [withStroke(linewidth=4.5, foreground="white")]
                ends = (left - width / 2, left + width / 2)
                legend["textbook total"] = axes.hlines(textbook / one, *ends, INK, lw=2, path_effects=outline)
            if run.fullest_rank:
                _above(axes, left, max(bottom, (textbook or 0) / one), written(totals[place]), len(runs))
            else:
                why = ABSENT.get(run.status, run.status)
                _note(axes, why, (place, 0), (0, 6), rotation=90, ha="center", va="bottom", color=ALARM)
            if peaks[place]:
                looks = {"fill": False, "edgecolor": INK, "linewidth": 1.1}
                legend["measured peak"] = axes.bar(place + shift, peaks[place] / one, width - 0.04, **looks)
                _above(axes, place + shift, peaks[place] / one, written(peaks[place]), len(runs))
        _names_below(axes, [_label(run) for run in runs], highest)
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3)
    return path


def _states(run: MeasuredRun) -> dict[str, int]:
    """Bytes by part, those that are there."""
    sizes = {part: getattr(run.fullest_rank, part, None) for part in STATES}
    return {part: size for part, size in sizes.items() if size}


def _draw_throughput(runs: Sequence[MeasuredRun], setting: str, path: Path) -> Path:
    """Non-padding tokens per second over all ranks, with the share of the baseline on top."""
    reference = read.baseline(runs)
    fastest = max((run.speed or 0 for run in runs), default=0)
    with _figure(path, BARS_INCHES) as figure:
        axes = _titled(figure.subplots(), "Throughput", setting)
        axes.set(ylim=(0, 1.16 * fastest or 1), ylabel="non-padding tokens per second, all ranks")
        axes.yaxis.set_major_formatter("{x:,.0f}" if fastest >= 10 else "{x:g}")
        for place, (run, colour) in enumerate(zip(runs, colours(runs), strict=True)):
            if run.speed is None:
                why = ABSENT.get(run.status, run.status)
                _note(axes, why, (place, 0), (0, 6), rotation=90, ha="center", va="bottom", color=ALARM)
                continue
            axes.bar(place, run.speed, 0.62, color=colour)
            label = units.count(run.speed)
            share = read.relative_speed(run, reference)
            if share is not None:
                label += f"\n{units.percent(share)}"
            _above(axes, place, run.speed, label, len(runs))
        _names_below(axes, [_label(run) for run in runs], fastest)
        if reference:
            axes.set_xlabel(f"percentages: relative to {reference.label}", fontsize=9.5)
    return path


def _draw_losses(runs: Sequence[MeasuredRun], setting: str, path: Path) -> Path:
    """All losses over each other; the judgement in words says how far they are apart."""
    trained = [(run, colour) for run, colour in zip(runs, colours(runs), strict=True) if run.loss_history]
    with _figure(path, BARS_INCHES) as figure:
        axes = _titled(figure.subplots(), "Training loss", setting)
        axes.set(xlabel="optimizer step", ylabel="loss")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for index, (run, colour) in enumerate(trained):
            # dashes take turns where curves coincide
            dashes = (-5.0 * (index - 1), (5.0, 5.0 * (len(trained) - 1))) if index else "-"
            axes.plot([*run.losses], [*run.losses.values()], color=colour, lw=2.2, ls=dashes, label=_label(run))
        if trained:
            legend = axes.legend(ncols=2 if len(trained) > 4 else 1, loc="upper right")
            for line in legend.get_lines():  # a dash may miss so short a line
                line.set_linestyle("-")
    return path


def colours(runs: Sequence[MeasuredRun]) -> list[str]:
    """One colour per run: the five strategies always have theirs, further ones take the next free one."""
    others = [run.label for run in runs if run.label not in STRATEGIES]
    return [STRATEGIES.get(run.label) or OTHERS[others.index(run.label) % len(OTHERS)] for run in runs]


@contextmanager
def _figure(path: Path, inches: tuple[float, float]) -> Iterator[Figure]:
    """A figure that is written to `path` at the end."""
    with matplotlib.rc_context(fname=STYLE):
        figure = Figure(figsize=inches, dpi=DPI, layout="constrained")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _titled(axes: Axes, text: str, setting: str) -> Axes:
    axes.set_title(text, loc="left", fontweight="bold", fontsize=12.5, pad=25)
    _note(axes, setting, (0, 1), (0, 8), xycoords="axes fraction", va="bottom", color=PALE, annotation_clip=False)
    axes.grid(axis="y")
    return axes


def _names_below(axes: Axes, names: Sequence[str], highest: float) -> None:
    """Names under the bars, broken at underscores so that long ones do not meet; no numbers where nothing is drawn."""
    labels = [name.replace("_", "\n").replace(" ", "\n") for name in names]
    axes.set_xticks(range(len(names)), labels, fontsize=10 if len(names) <= 6 else 9)
    spare = max(0, 4 - len(names)) / 2  # two bars alone would look like walls
    axes.set_xlim(-0.6 - spare, len(names) - 0.4 + spare)
    axes.tick_params(axis="x", length=0)
    if not highest:
        axes.set_yticks([])


def _above(axes: Axes, place: float, height: float, text: str, bars: int) -> None:
    """A number over a bar."""
    clear = [withStroke(linewidth=3, foreground="white")]  # over a bar or a line
    looks = {"ha": "center", "va": "bottom", "fontsize": 9.5 if bars <= 6 else 8, "path_effects": clear}
    _note(axes, text, (place, height), (0, 3), **looks)


def _note(axes: Axes, text: str, at: tuple[float, float], shift: tuple[float, float], **looks: Any) -> None:
    axes.annotate(text, at, xytext=shift, textcoords="offset points", **({"fontsize": 9.5} | looks))


def _label(run: MeasuredRun) -> str:
    return run.label if run.status == "ok" else f"{run.label} ({run.status})"
