"""The report's pictures, without pyplot, which touches global state."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
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
from zero_recipes.tools.report.read import Runs

INCHES = (8.0, 4.8)
DPI = 150
PEAK_SHIFT = 0.21  # from the middle, in which stack and peak stand side by side
INK = "#24292f"
PALE = "#57606a"
ALARM = "#b3261e"
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


def draw_comparison(runs: Runs, folder: Path) -> dict[str, Path]:
    """Returns paths by name; none if there is nothing to compare."""
    compared = read.comparison(runs)
    if not compared:
        return {}
    drawings = {"staircase": _draw_states, "throughput": _draw_throughput, "loss": _draw_losses}
    pictures = {}
    for name, draw in drawings.items():
        pictures[name] = folder / f"{name}.png"
        with _figure(pictures[name]) as figure:
            draw(figure, compared)
    return pictures


def _draw_states(figure: Figure, runs: Runs) -> None:
    """Model states as a stack, marked at the textbook's total, with the measured peak beside it."""
    peaks = [run.peak("allocated") or 0 for run in runs]
    totals = [sum(_states(run).values()) for run in runs]
    highest = max(*peaks, *totals, *(read.textbook(run) or 0 for run in runs))
    unit, one = units.unit_of(highest)
    width = 0.4 if any(peaks) else 0.56
    axes = _titled_axes(figure, "Model states on the fullest rank", runs)
    axes.set(ylabel=f"memory of the fullest rank in {unit}", ylim=(0, 1.12 * highest / one or 1))
    legend: dict[str, Any] = {}
    for place, (run, peak, total) in enumerate(zip(runs, peaks, totals, strict=True)):
        left = place - PEAK_SHIFT if peak else place
        top = _draw_stack(axes, run, left, width, one, legend)
        if run.fullest_rank:
            _above(axes, left, top, _written(total, one), len(runs))
        else:
            _in_place_of_bar(axes, place, run)
        if peak:
            right = place + PEAK_SHIFT
            legend["measured peak"] = axes.bar(right, peak / one, width - 0.04, fill=False, ec=INK, lw=1.1)
            _above(axes, right, peak / one, _written(peak, one), len(runs))
    _names_below(axes, runs, highest)
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3)


def _states(run: MeasuredRun) -> dict[str, int]:
    """Bytes by part."""
    sizes = {}
    for part in STATES:
        size = getattr(run.fullest_rank, part, None)
        if size:
            sizes[part] = size
    return sizes


def _draw_stack(axes: Axes, run: MeasuredRun, center: float, width: float, one: int, legend: dict[str, Any]) -> float:
    """Returns where it ends, the textbook's mark included. `one`: bytes of the axis's unit."""
    top = 0.0
    for part, size in _states(run).items():
        colour, name = STATES[part]
        legend[name] = axes.bar(center, size / one, width, top, color=colour, ec="white", lw=0.6)
        top += size / one
    textbook = read.textbook(run)
    if not textbook:
        return top
    ends = (center - width / 2, center + width / 2)
    outline = [withStroke(linewidth=4.5, foreground="white")]
    legend["textbook total"] = axes.hlines(textbook / one, *ends, INK, lw=2, path_effects=outline)
    return max(top, textbook / one)


def _written(size: int, one: int) -> str:
    """In the axis's unit; smaller sizes in their own."""
    return units.significant(size / one) if size >= one else units.size(size)


def _draw_throughput(figure: Figure, runs: Runs) -> None:
    reference = read.baseline(runs)
    fastest = max(run.speed or 0 for run in runs)
    axes = _titled_axes(figure, "Throughput", runs)
    axes.set(ylim=(0, 1.16 * fastest or 1), ylabel="non-padding tokens per second, all ranks")
    axes.yaxis.set_major_formatter("{x:,.0f}" if fastest >= 10 else "{x:g}")
    for place, (run, colour) in enumerate(zip(runs, colours(runs), strict=True)):
        if run.speed is None:
            _in_place_of_bar(axes, place, run)
            continue
        axes.bar(place, run.speed, 0.62, color=colour)
        label = units.count(run.speed)
        share = read.relative_speed(run, reference)
        if share is not None:
            label += f"\n{units.percent(share)}"
        _above(axes, place, run.speed, label, len(runs))
    _names_below(axes, runs, fastest)
    if reference:
        axes.set_xlabel(f"percentages: relative to {reference.label}", fontsize=9.5)


def _draw_losses(figure: Figure, runs: Runs) -> None:
    axes = _titled_axes(figure, "Training loss", runs)
    axes.set(xlabel="optimizer step", ylabel="loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    trained = [(run, colour) for run, colour in zip(runs, colours(runs), strict=True) if run.loss_history]
    for index, (run, colour) in enumerate(trained):
        # dashes take turns where curves coincide
        dashes = (-5.0 * (index - 1), (5.0, 5.0 * (len(trained) - 1))) if index else "-"
        axes.plot([*run.losses], [*run.losses.values()], color=colour, lw=2.2, ls=dashes, label=_label(run))
    if trained:
        legend = axes.legend(ncols=2 if len(trained) > 4 else 1, loc="upper right")
        for line in legend.get_lines():  # a dash may miss so short a line
            line.set_linestyle("-")


def colours(runs: Runs) -> list[str]:
    """The five strategies keep theirs; others take the next free one."""
    others = cycle(OTHERS)
    return [STRATEGIES.get(run.label) or next(others) for run in runs]


@contextmanager
def _figure(path: Path) -> Iterator[Figure]:
    """Saved to `path` at the end."""
    with matplotlib.rc_context(fname=STYLE):
        figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _titled_axes(figure: Figure, title: str, runs: Runs) -> Axes:
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontweight="bold", fontsize=12.5, pad=25)
    looks = {"xycoords": "axes fraction", "va": "bottom", "color": PALE, "annotation_clip": False}
    _note(axes, read.setting(runs), (0, 1), (0, 8), **looks)
    axes.grid(axis="y")
    return axes


def _names_below(axes: Axes, runs: Runs, highest: float) -> None:
    """Broken so that long names do not meet; no numbers if nothing is drawn."""
    names = [_label(run).replace("_", "\n").replace(" ", "\n") for run in runs]
    axes.set_xticks(range(len(names)), names, fontsize=10 if len(names) <= 6 else 9)
    spare = max(0, 4 - len(names)) / 2  # two bars alone would look like walls
    axes.set_xlim(-0.6 - spare, len(names) - 0.4 + spare)
    axes.tick_params(axis="x", length=0)
    if not highest:
        axes.set_yticks([])


def _above(axes: Axes, place: float, height: float, text: str, bars: int) -> None:
    clear = [withStroke(linewidth=3, foreground="white")]  # over a bar or a line
    size = 9.5 if bars <= 6 else 8
    _note(axes, text, (place, height), (0, 3), ha="center", va="bottom", fontsize=size, path_effects=clear)


def _in_place_of_bar(axes: Axes, place: float, run: MeasuredRun) -> None:
    why = ABSENT.get(run.status, run.status)
    _note(axes, why, (place, 0), (0, 6), rotation=90, ha="center", va="bottom", color=ALARM)


def _note(axes: Axes, text: str, at: tuple[float, float], shift: tuple[float, float], **looks: Any) -> None:
    """`shift`: in points."""
    looks.setdefault("fontsize", 9.5)
    axes.annotate(text, at, xytext=shift, textcoords="offset points", **looks)


def _label(run: MeasuredRun) -> str:
    return run.label if run.status == "ok" else f"{run.label} ({run.status})"
