"""Where each run's seconds went: one horizontal bar a run, its phases one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from zero_recipes.core.phases import PHASES
from zero_recipes.core.plot_style import DPI, FAINT, STYLE
from zero_recipes.metrics.read_runs import MeasuredRun

# what comes before training in blues and greys, training in greens, what stands beside it in warm colours
COLOURS = dict(zip(PHASES, ("#2f4b7c", "#8e5ea2", "#5a8f9c", "#4f9d69", "#e0a030", "#b8574e"), strict=True))
INCHES, INCHES_OF_A_BAR = (8.0, 1.95), 0.36
SHOWN = 0.06  # of the longest bar: a phase's number is written into its part where that is so wide


def seconds_by_phase(run: MeasuredRun) -> dict[str, float]:
    """{phase: seconds}, in the order of a run."""
    written = {} if run.phase_seconds is None else run.phase_seconds.model_dump(exclude_none=True)
    return {name: seconds for name, seconds in written.items() if seconds}


def draw(runs: Sequence[MeasuredRun], setting: str, path: Path) -> Path | None:
    """Write the picture; None where no run has measured its phases."""
    timed = [(run, seconds) for run in runs if (seconds := seconds_by_phase(run))]
    if not timed:
        return None
    with matplotlib.rc_context(STYLE):
        size = (INCHES[0], INCHES[1] + INCHES_OF_A_BAR * len(timed))
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.set_title("Where the seconds go", loc="left", fontweight="bold", fontsize=12.5, pad=25)
        axes.annotate(setting, (0, 1), xycoords="axes fraction", xytext=(0, 8), textcoords="offset points",
                      fontsize=9.5, color="#57606a", ha="left", va="bottom", annotation_clip=False)  # fmt: skip
        longest = max(sum(seconds.values()) for _, seconds in timed)
        for place, (_, seconds) in enumerate(timed):
            _bar(axes, place, seconds, longest)
        axes.set_yticks(range(len(timed)), [run.label for run, _ in timed])
        axes.set_ylim(len(timed) - 0.4, -0.6)
        axes.set_xlim(0, 1.08 * longest)
        axes.set_xlabel("seconds of rank 0, from the start of its process")
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color=FAINT, lw=0.8)
        for name in (name for name in PHASES if any(name in seconds for _, seconds in timed)):
            axes.barh(0, 0, color=COLOURS[name], label=name.replace("_", " "))
        figure.legend(loc="outside lower center", ncols=5, handlelength=1.4)
        figure.savefig(path)
    return path


def _bar(axes: Axes, place: int, seconds: dict[str, float], longest: float) -> None:
    left = 0.0
    for name, spent in seconds.items():
        axes.barh(place, spent, 0.66, left=left, color=COLOURS[name], edgecolor="white", linewidth=0.6)
        if spent >= SHOWN * longest:
            dark = name != "eval"
            axes.annotate(f"{spent:.1f}", (left + spent / 2, place), ha="center", va="center", fontsize=8.5,
                          color="white" if dark else "#24292f")  # fmt: skip
        left += spent
    axes.annotate(f"{left:.1f}", (left, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9.5)
