"""One picture: what each strategy takes of a GPU, part by part, against the line of its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from zero_recipes.core import units
from zero_recipes.core.plot_style import ALARM, DPI, FAINT, INK, STYLE
from zero_recipes.core.plot_style import PART_COLOURS as STATES
from zero_recipes.metrics.prediction import PARTS

INCHES = (8.0, 4.8)
COLOURS = STATES | {"activations": "#aa4466", "buckets": "#88ccee", "loss_head": "#ccbb44", "other": "#bbbbbb"}
LABELS = {"buckets": "buckets, gathered", "loss_head": "loss head"}
BEYOND = 2.0  # of the GPU's memory: bars that go further are cut, and say how far they go


@dataclass(frozen=True)
class Bar:
    """One strategy, in bytes: the planned peak by parts, what the process reserves, and the measured peak."""

    name: str
    at_peak: Mapping[str, int]  # by PARTS
    reserved: tuple[int, int]  # low, high
    measured: int | None = None


def draw(bars: Sequence[Bar], capacity: int | None, title: str, subtitle: str, path: Path) -> Path:
    """Write a PNG. `capacity`: bytes of one GPU, None where it is not known."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        _bars(figure, bars, capacity)
        axes = figure.axes[0]
        axes.set_title(title, loc="left", fontweight="bold", fontsize=12.5, pad=25)
        axes.annotate(subtitle, (0, 1), xycoords="axes fraction", xytext=(0, 8), textcoords="offset points",
                      fontsize=9.5, color="#57606a", ha="left", va="bottom", annotation_clip=False)  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return path


def _bars(figure: Figure, bars: Sequence[Bar], capacity: int | None) -> None:
    axes = figure.subplots()
    highest = max([capacity or 0, *(max(_high(bar), bar.measured or 0) for bar in bars)])
    top = highest if capacity is None else min(highest, BEYOND * capacity)
    unit, one = units.unit_of(top)
    measured = any(bar.measured for bar in bars)
    width = 0.38 if measured else 0.56
    for place, bar in enumerate(bars):
        left = place - 0.21 if measured else place
        bottom = 0.0
        for part in PARTS:
            height = bar.at_peak.get(part, 0) / one
            axes.bar(left, height, width, bottom=bottom, color=COLOURS[part], edgecolor="white", linewidth=0.6)
            bottom += height
        low, high = (end / one for end in bar.reserved)
        axes.plot([left, left], [low, high], color=INK, lw=1.3)
        axes.plot([left - 0.09, left + 0.09], [high, high], color=INK, lw=1.3)
        _label(axes, left, high, top / one, units.significant(bottom))
        if bar.measured:
            axes.bar(place + 0.21, bar.measured / one, width - 0.04, fill=False, edgecolor=INK, linewidth=1.1)
            _label(axes, place + 0.21, bar.measured / one, top / one, units.significant(bar.measured / one))
    if capacity is not None:
        axes.axhline(capacity / one, color=ALARM, lw=1.6)
    axes.set_ylim(0, 1.12 * top / one)
    axes.set_ylabel(f"memory of the fullest GPU in {unit}")
    axes.set_xticks(range(len(bars)), [bar.name.replace("_", "\n") for bar in bars])
    axes.set_xlim(-0.6, len(bars) - 0.4)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", color=FAINT, lw=0.8)
    _legend(figure, bars, measured, capacity)


def _high(bar: Bar) -> int:
    return max(bar.reserved[1], sum(bar.at_peak.values()))


def _label(axes, place: float, height: float, top: float, text: str) -> None:
    """The allocated peak over a bar; inside the frame where the bar is cut."""
    cut = height > 1.05 * top
    axes.annotate(f"{text} ↑" if cut else text, (place, 1.06 * top if cut else height), xytext=(0, 3),
                  textcoords="offset points", ha="center", va="bottom", fontsize=9,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip


def _legend(figure: Figure, bars: Sequence[Bar], measured: bool, capacity: int | None) -> None:
    """The parts that some bar has, then what the lines are."""
    shown = [part for part in PARTS if any(bar.at_peak.get(part) for bar in bars)]
    handles = [Patch(color=COLOURS[part], label=LABELS.get(part, part)) for part in shown]
    if measured:
        handles.append(Patch(fill=False, edgecolor=INK, linewidth=1.1, label="measured peak"))
    handles.append(Line2D([], [], color=INK, lw=1.3, label="up to, with allocator, CUDA, NCCL"))
    if capacity is not None:
        handles.append(Line2D([], [], color=ALARM, lw=1.6, label=f"the GPU's memory, {units.size(capacity)}"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
