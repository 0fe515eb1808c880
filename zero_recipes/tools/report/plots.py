"""The report's pictures, without pyplot, which touches global state."""

from collections.abc import Iterable
from pathlib import Path

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from zero_recipes.core import units
from zero_recipes.metrics.read_runs import MeasuredRun
from zero_recipes.tools.report import read
from zero_recipes.tools.report.read import Runs

# as wide as half a page on a desk, and a whole one on a telephone: the texts stay legible on both
INCHES = (6.6, 4.8)
INCHES_PER_RUN = 1.05  # where there are more runs than fit
DPI = 150
PEAK_SHIFT = 0.21  # from the middle, in which stack and peak stand side by side
INK = "#24292f"
PALE = "#57606a"
ALARM = "#b3261e"
STYLE = Path(__file__).with_name("style.mplstyle")
# of strategies; others take the next colour of the style
STRATEGIES = {"ddp": "#7a7a7a", "zero0": "#cc4b58", "zero1": "#e0a030", "zero2": "#2a9d8f", "zero3": "#33608c"}
# model states, from the bottom to the top: colour and name
STATES = {
    "params": ("#4477aa", "params"),
    "grads": ("#ee9b3d", "grads"),
    "optimizer": ("#66a182", "optimizer"),
    "offloaded_host": ("#c3cad3", "on host"),
    "offloaded_disk": ("#e3d9c6", "on disk"),
}
ABSENT = {"oom": "out of memory", "ok": "not measured"}  # why there is no bar, by status


def draw_comparison(runs: Runs, folder: Path) -> dict[str, Path]:
    """Draw model states, speeds and losses of the compared runs. Returns paths by name; none without such runs."""
    compared = read.comparison(runs)
    if not compared:
        return {}
    pictures = {}
    with matplotlib.rc_context(fname=STYLE):
        width, height = INCHES
        size = (max(width, INCHES_PER_RUN * len(compared)), height)
        drawn = {"staircase": _draw_states, "loss": _draw_losses}
        if any(run.speed for run in compared):
            drawn["speed"] = _draw_speeds
        for name, draw in drawn.items():
            figure = Figure(figsize=size, dpi=DPI, layout="constrained")
            draw(figure, compared)
            pictures[name] = folder / f"{name}.png"
            figure.savefig(pictures[name])
    return pictures


def _draw_states(figure: Figure, runs: Runs) -> None:
    """Model states as a stack, marked at the textbook's total, with the measured peak beside it."""
    states = {part: _sizes(getattr(run.fullest_rank, part, None) for run in runs) for part in STATES}
    peaks = _sizes(run.peak("allocated") for run in runs)
    textbook = _sizes(read.textbook(run) for run in runs)
    tops = numpy.maximum(sum(states.values()), textbook)
    unit, one = units.unit_of(max(*peaks, *tops))
    axes = _titled_axes(figure, "Model states on the fullest rank", runs)
    axes.set_ylabel(f"memory of the fullest rank in {unit}")
    left = numpy.arange(len(runs)) - PEAK_SHIFT * (peaks > 0)
    width = 0.4 if peaks.any() else 0.56
    stacked = numpy.zeros(len(runs))
    for part, sizes in states.items():
        if sizes.any():
            colour, name = STATES[part]
            axes.bar(left, sizes / one, width, stacked / one, color=colour, ec="white", lw=0.6, label=name)
            stacked += sizes
    if textbook.any():
        at = textbook > 0
        ends = (left[at] - width / 2, left[at] + width / 2)
        outline = [withStroke(linewidth=4.5, foreground="white")]
        axes.hlines(textbook[at] / one, *ends, INK, lw=2, path_effects=outline, label="textbook total")
    for run, place, top, size in zip(runs, left, tops / one, stacked, strict=True):
        if size:
            _above(axes, place, top, _written(size, one))
        else:  # why there is no bar
            why = ABSENT.get(run.status, run.status)
            axes.annotate(why, (place, 0), (0, 6), textcoords="offset points", rotation=90, ha="center", color=ALARM)
    if peaks.any():
        right = left + 2 * PEAK_SHIFT
        axes.bar(right, peaks / one, width - 0.04, fill=False, ec=INK, lw=1.1, label="measured peak")
        for place, peak in zip(right, peaks, strict=True):
            if peak:
                _above(axes, place, peak / one, _written(peak, one))
    _name_bars(axes, runs)
    figure.legend(loc="outside lower center", ncols=4)


def _name_bars(axes: Axes, runs: Runs) -> None:
    """Write the runs' names under bars at 0, 1, 2 and so on."""
    # broken so that long names do not meet
    names = [_label(run).replace("_", "\n").replace(" ", "\n") for run in runs]
    axes.set_xticks(range(len(names)), names, fontsize=10 if len(names) <= 6 else 9)
    axes.set_xlim(-0.6, max(len(names), 4) - 0.4)  # two bars alone would look like walls
    axes.tick_params(axis="x", length=0)


def _draw_speeds(figure: Figure, runs: Runs) -> None:
    """A bar for each run's tokens/s, in the colour of its loss."""
    on_cpu = any(run.device == "cpu" for run in runs)
    axes = _titled_axes(figure, "Speed on these CPUs, not a GPU's" if on_cpu else "Speed", runs)
    axes.set_ylabel("tokens/s, without padding")
    for place, run in enumerate(runs):
        if run.speed:
            axes.bar(place, run.speed, 0.56, color=STRATEGIES.get(run.label), ec="white", lw=0.6)
            _above(axes, place, run.speed, units.count(run.speed))
    _name_bars(axes, runs)


def _sizes(values: Iterable[float | None]) -> numpy.ndarray:
    """0 for what is not known."""
    return numpy.array([value or 0 for value in values], dtype=float)


def _written(size: float, one: int) -> str:
    """In the axis's unit; smaller sizes in their own."""
    return units.significant(size / one) if size >= one else units.size(size)


def _draw_losses(figure: Figure, runs: Runs) -> None:
    axes = _titled_axes(figure, "Training loss", runs)
    axes.set(xlabel="optimizer step", ylabel="loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    trained = [run for run in runs if run.loss_history]
    width = 0.5 + len(trained)
    for run in trained:
        colour = STRATEGIES.get(run.label)
        axes.plot([*run.losses], [*run.losses.values()], color=colour, lw=width, label=_label(run))
        width -= 1  # curves that coincide are stripes
    if trained:
        axes.legend(ncols=2 if len(trained) > 4 else 1, loc="upper right")


def _titled_axes(figure: Figure, title: str, runs: Runs) -> Axes:
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontweight="bold", fontsize=12.5, pad=25)
    axes.annotate(read.setting(runs), (0, 1), (0, 8), "axes fraction", "offset points", color=PALE, fontsize=9.5)
    axes.grid(axis="y")
    axes.margins(y=0.12)
    return axes


def _above(axes: Axes, place: float, height: float, text: str) -> None:
    clear = [withStroke(linewidth=3, foreground="white")]  # over a bar or a line
    looks = {"textcoords": "offset points", "ha": "center", "fontsize": 9, "path_effects": clear}
    axes.annotate(text, (place, height), (0, 5), **looks)


def _label(run: MeasuredRun) -> str:
    return run.label if run.status == "ok" else f"{run.label} ({run.status})"
