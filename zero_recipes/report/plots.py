"""The pictures of the report. Sizes in bytes come in, PNG files go out.

Figures are built without pyplot: nothing global is touched and no display is looked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from zero_recipes.core import units
from zero_recipes.metrics.read_runs import MeasuredRun, draw_losses
from zero_recipes.metrics.schema import ReservedRange
from zero_recipes.report import read

BARS_INCHES = (8.0, 4.8)
DPI = 150
INK, PALE, ALARM = "#24292f", "#57606a", "#b3261e"
STYLE = Path(__file__).with_name("style.mplstyle")
STRATEGIES = {"ddp": "#7a7a7a", "zero0": "#cc4b58", "zero1": "#e0a030", "zero2": "#2a9d8f", "zero3": "#33608c"}
OTHERS = ("#8e5ea2", "#a0642e", "#7fa653", "#c77cb0", "#4f4f87")
# parts of a stack
MEMORY = {
    "params": "#4477aa", "grads": "#ee9b3d", "optimizer": "#66a182", "activations": "#aa4466", "buckets": "#88ccee",
    "loss_head": "#ccbb44", "other": "#bbbbbb", "offloaded_host": "#c3cad3", "offloaded_disk": "#e3d9c6",
}  # fmt: skip
LABELS = {"buckets": "buckets, gathered", "offloaded_host": "on host", "offloaded_disk": "on disk"}
STATES = ("params", "grads", "optimizer", "offloaded_host", "offloaded_disk")
BEYOND = 2.0  # of the GPU's memory: bars that go further are cut, and say how far they go
ABSENT = {"oom": "out of memory", "ok": "not measured"}  # why there is no bar, by status


@dataclass(frozen=True)
class Bar:
    """The memory of one strategy, in bytes."""

    name: str
    parts: Mapping[str, int]  # of MEMORY, from the bottom to the top
    peak: int | None = None  # measured; outlined beside the stack
    textbook: float | None = None  # a mark across the stack
    reserved: ReservedRange | None = None  # a line from low to high
    absent: str = ""  # why there are no parts

    @property
    def top(self) -> float:
        """Of the stack and of what is drawn over it."""
        return max(sum(self.parts.values()), self.textbook or 0, self.reserved.high if self.reserved else 0)


def draw_comparison(runs: Sequence[MeasuredRun], folder: Path) -> dict[str, Path]:
    """Write the pictures of the comparison, by name; those that the runs have no numbers for are left out."""
    compared = read.comparison(runs)
    setting, drawn = read.setting(compared or runs), {}
    if compared:
        bars, path = list(map(_state_bar, compared)), folder / "staircase.png"
        drawn["staircase"] = draw_memory(bars, "Model states on the fullest rank", setting, path)
        drawn["throughput"] = _draw_throughput(compared, setting, folder / "throughput.png")
        drawn["loss"] = _draw_losses(compared, setting, folder / "loss.png")
    if planned := [run for run in compared if read.planned_peak(run) and run.predicted.at_peak]:
        memory = list(filter(None, [(run.hardware or {}).get("gpu_memory_bytes") for run in planned]))
        plans = [(run, run.predicted) for run in planned]
        bars = [Bar(run.label, p.at_peak, run.peak("allocated"), reserved=p.reserved_bytes) for run, p in plans]
        capacity = min(memory, default=None)
        title, path = "Planned memory, and the measured peak", folder / "plan.png"
        drawn["plan"] = draw_memory(bars, title, setting, path, capacity)
    return drawn


def draw_single(run: MeasuredRun, folder: Path) -> Path | None:
    """Write run_<folder>.png with the losses of training and evaluation; None where nothing was trained."""
    if not run.loss_history:
        return None
    path = folder / f"run_{run.folder.name}.png"
    with _figure(path, BARS_INCHES) as figure:
        axes = _titled(figure.subplots(), f"Training loss of {run.label}", read.setting([run]))
        draw_losses(axes, run)
    return path


def draw_memory(bars: Sequence[Bar], title: str, setting: str, path: Path, capacity: int | None = None) -> Path:
    """Stacks of memory, with the measured peak beside each. `capacity`: bytes of one GPU, a line across."""
    highest = max(max(bar.top, bar.peak or 0) for bar in bars)
    highest = highest if capacity is None else min(max(highest, capacity), BEYOND * capacity)
    unit, one = units.unit_of(highest)
    written = lambda size: units.significant(size / one) if size >= one else units.size(size)  # noqa: E731
    width, shift = (0.4, 0.21) if any(bar.peak for bar in bars) else (0.56, 0.0)
    with _figure(path, BARS_INCHES) as figure:
        axes = _titled(figure.subplots(), title, setting)
        axes.set(ylabel=f"memory of the fullest rank in {unit}", ylim=(0, 1.12 * highest / one or 1))
        legend: dict[str, Any] = {}
        lefts, bottoms = [place - shift if bar.peak else place for place, bar in enumerate(bars)], np.zeros(len(bars))
        for part, colour in MEMORY.items():
            sizes = np.array([bar.parts.get(part, 0) / one for bar in bars])
            if sizes.any():
                looks = {"color": colour, "edgecolor": "white", "linewidth": 0.6}
                legend[LABELS.get(part, part)] = axes.bar(lefts, sizes, width, bottoms, **looks)
                bottoms += sizes
        for place, (left, bar) in enumerate(zip(lefts, bars, strict=True)):
            if bar.textbook:
                outline = [withStroke(linewidth=4.5, foreground="white")]
                ends = (left - width / 2, left + width / 2)
                legend["textbook total"] = axes.hlines(bar.textbook / one, *ends, INK, lw=2, path_effects=outline)
            if bar.reserved:
                low, high = bar.reserved.low / one, bar.reserved.high / one
                legend["up to, with allocator, CUDA, NCCL"] = axes.vlines(left, low, high, INK, lw=1.3)
                axes.hlines(high, left - 0.09, left + 0.09, INK, lw=1.3)
            if bar.absent:
                _say(axes, place, bar.absent)
            else:
                _above(axes, left, bar.top / one, written(sum(bar.parts.values())), len(bars))
            if bar.peak:
                looks = {"fill": False, "edgecolor": INK, "linewidth": 1.1}
                legend["measured peak"] = axes.bar(place + shift, bar.peak / one, width - 0.04, **looks)
                _above(axes, place + shift, bar.peak / one, written(bar.peak), len(bars))
        if capacity is not None:
            line = axes.axhline(capacity / one, color=ALARM, lw=1.6)
            legend[f"the GPU's memory, {units.size(capacity)}"] = line
        _names_below(axes, [bar.name for bar in bars], highest)
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3)
    return path


def _state_bar(run: MeasuredRun) -> Bar:
    """Model states of the fullest rank, in grey on top what is on host and disk."""
    rank = run.fullest_rank
    parts = {part: getattr(rank, part) or 0 for part in STATES} if rank else {}
    absent = "" if rank else ABSENT.get(run.status, run.status)
    return Bar(_label(run), parts, run.peak("allocated"), read.textbook(run), absent=absent)


def _draw_throughput(runs: Sequence[MeasuredRun], setting: str, path: Path) -> Path:
    """Non-padding tokens per second over all ranks, with the share of the baseline on top."""
    reference, fastest = read.baseline(runs), max((run.speed or 0 for run in runs), default=0)
    with _figure(path, BARS_INCHES) as figure:
        axes = _titled(figure.subplots(), "Throughput", setting)
        for place, (run, colour) in enumerate(zip(runs, colours(runs), strict=True)):
            if (speed := run.speed) is None:
                _say(axes, place, ABSENT.get(run.status, run.status))
                continue
            axes.bar(place, speed, 0.62, color=colour)
            share = read.relative_speed(run, reference)
            label = units.count(speed) if share is None else f"{units.count(speed)}\n{units.percent(share)}"
            _above(axes, place, speed, label, len(runs))
        axes.set(ylim=(0, 1.16 * fastest or 1), ylabel="non-padding tokens per second, all ranks")
        axes.yaxis.set_major_formatter("{x:,.0f}" if fastest >= 10 else "{x:g}")
        _names_below(axes, list(map(_label, runs)), fastest)
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
            losses = run.losses
            # dashes take turns where curves coincide; a thin line joins them
            dashes = (-5.0 * (index - 1), (5.0, 5.0 * (len(trained) - 1))) if index else "-"
            _lines(axes, losses, color=colour, lw=0.9, zorder=1)
            _lines(axes, losses, color=colour, lw=2.2, ls=dashes, zorder=2)
        samples = [Line2D([], [], color=colour, lw=2.2, label=_label(run)) for run, colour in trained]
        axes.legend(handles=samples, ncols=2 if len(samples) > 4 else 1, loc="upper right")
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


def _lines(axes: Axes, points: Mapping[Any, float], **looks: Any) -> None:
    axes.plot(list(points), list(points.values()), **looks)


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
    """A number over a bar; inside the frame, with an arrow, where the bar is cut."""
    top = axes.get_ylim()[1]
    text, height = (f"{text} ↑", 0.95 * top) if height > top else (text, height)
    clear = [withStroke(linewidth=3, foreground="white")]  # over a bar or a line
    looks = {"ha": "center", "va": "bottom", "fontsize": 9.5 if bars <= 6 else 8, "path_effects": clear}
    _note(axes, text, (place, height), (0, 3), **looks)


def _say(axes: Axes, place: float, words: str) -> None:
    """Where a bar or a point would be: why there is none."""
    _note(axes, words, (place, 0), (0, 6), xycoords=axes.get_xaxis_transform(), rotation=90, ha="center", va="bottom",
          color=ALARM)  # fmt: skip


def _note(axes: Axes, text: str, at: tuple[float, float], shift: tuple[float, float], **looks: Any) -> None:
    axes.annotate(text, at, xytext=shift, textcoords="offset points", **({"fontsize": 9.5} | looks))


def _label(run: MeasuredRun) -> str:
    return run.label if run.status == "ok" else f"{run.label} ({run.status})"
