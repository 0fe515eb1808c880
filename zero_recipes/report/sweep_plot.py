"""The picture of a sweep of values: memory, bytes and step time over the values of its first key."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

from zero_recipes.core import units
from zero_recipes.core.plot_style import ALARM, DPI, FAINT, STYLE
from zero_recipes.report.swept import short_names, value_text

INCHES = (9.0, 6.2)
COLOURS = ("#33608c", "#cc4b58", "#2a9d8f", "#e0a030", "#8e5ea2", "#a0642e", "#7fa653", "#7a7a7a")
MARKERS, DASHES = "os^Dvph", ("-", "--", ":", "-.")  # lines that lie on each other can all be seen
PREFIXES = (("G", 10**9), ("M", 10**6), ("k", 10**3))
NEAREST = 0.05  # share of the axis between two labels
ENDED = {"oom": "out of memory", "ok": "not measured"}

Row = Mapping[str, Any]  # of rows.table_rows
Points = dict[Any, float]  # by the value's place on the axis


def draw(swept: Sequence[Row], setting: str, path: Path, dpi: int = DPI, peak: tuple[str, str] | None = None) -> Path:
    """Write a PNG of the rows of one sweep: a line for each combination of the other keys and the strategy.

    `peak`: (title, key of the rows) of another peak of memory than the one that was measured.
    The axis of the values is logarithmic where they are numbers of several magnitudes, else one place for each value.
    """
    keys = list(swept[0]["swept"])
    values = list({value_text(row["swept"][keys[0]]): row["swept"][keys[0]] for row in swept}.values())
    logarithmic = _spans_decades(values)
    places = {value_text(value): value if logarithmic else index for index, value in enumerate(values)}
    lines: dict[str, list[Row]] = {}
    for row in swept:
        lines.setdefault(_line_name(row, keys[1:], swept), []).append(row)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=INCHES, dpi=dpi, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(f"{', '.join(keys)}\n{setting}", x=0.01, ha="left", fontsize=10.5)
        for axes, (name, measure, is_bytes) in zip(figure.subplots(2, 2).flat, _panels(swept, peak), strict=True):
            axes.set_title(name, loc="left", fontweight="bold", fontsize=10.5)
            _panel(axes, lines, lambda row: places[value_text(row["swept"][keys[0]])], measure, is_bytes)
            _value_axis(axes, list(places.values()), values, logarithmic, short_names(keys)[keys[0]])
        if len(lines) > 1:
            figure.legend(handles=axes.get_lines()[: len(lines)], loc="outside lower center", ncols=min(len(lines), 4))
        figure.savefig(path)
    return path


def _panels(
    swept: Sequence[Row], peak: tuple[str, str] | None
) -> list[tuple[str, Callable[[Row], float | None], bool]]:
    """(title, what is drawn of a row, whether it is bytes)"""
    if peak is None and all(row["peak_allocated_bytes"] is None for row in swept):
        peak = ("Resident memory of a process", "resident_bytes")
    title, key = peak or ("Peak allocated on a rank", "peak_allocated_bytes")
    return [
        ("Model states on the fullest rank", lambda row: row["state_bytes"], True),
        (title, lambda row: row[key], True),
        ("Sent in a step (an all-reduce twice)", lambda row: row["communication_bytes"], True),
        ("Step, median in seconds", lambda row: row["step_seconds_median"], False),
    ]


def _panel(
    axes: Axes,
    lines: Mapping[str, Sequence[Row]],
    place: Callable[[Row], Any],
    measure: Callable[[Row], float | None],
    is_bytes: bool,
) -> None:
    highest = max((measure(row) or 0 for rows in lines.values() for row in rows), default=0)
    unit, one = units.unit_of(highest) if is_bytes else ("seconds", 1)
    for number, (label, rows) in enumerate(lines.items()):
        points = {place(row): value / one if (value := measure(row)) is not None else math.nan for row in rows}
        style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
        style["linestyle"] = DASHES[number % len(DASHES)]
        points = dict(sorted(points.items()))  # of a line from left to right
        axes.plot(list(points), list(points.values()), label=label, lw=1.6, ms=5, clip_on=False, **style)
    ended = {place(row): ENDED.get(row["status"], row["status"]) for rows in lines.values() for row in rows
             if measure(row) is None}  # fmt: skip
    for where, words in ended.items():
        axes.annotate(words, (where, 0), xycoords=axes.get_xaxis_transform(), xytext=(0, 5),
                      textcoords="offset points", rotation=90, ha="center", va="bottom", color=ALARM,
                      fontsize=9)  # fmt: skip
    axes.set_ylabel(unit)
    axes.set_ylim(0, 1.15 * highest / one if highest else 1)
    if not highest:
        axes.set_yticks([])
    axes.grid(axis="y", color=FAINT, lw=0.8)


def _value_axis(axes: Axes, places: Sequence[float], values: Sequence[Any], logarithmic: bool, name: str) -> None:
    if logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(min(places) / 1.6, max(places) * 1.6)
    else:
        axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_xticks(places, [_tick(value) for value in values], fontsize=9)
    axes.set_xlabel(name, fontsize=9.5)


def _tick(value: Any) -> str:
    """A short label: 500k, 50M, true, auto."""
    if isinstance(value, int) and not isinstance(value, bool):
        prefix, one = next(((prefix, one) for prefix, one in PREFIXES if abs(value) >= max(one, 10_000)), ("", 1))
        return f"{value / one:g}{prefix}" if prefix else str(value)
    text = value_text(value)
    return text if len(text) <= 14 else text[:13] + "…"


def _spans_decades(values: Sequence[Any]) -> bool:
    """Whether they are numbers above zero, the largest at least ten times the smallest, none too near to another for
    both to have their labels."""
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 for value in values):
        return False
    tens = sorted(math.log10(value) for value in values)
    span = tens[-1] - tens[0]
    return span >= 1 and all(higher - lower >= NEAREST * span for lower, higher in pairwise(tens))


def _line_name(row: Row, keys: Sequence[str], swept: Sequence[Row]) -> str:
    names = short_names(keys)
    parts = [f"{names[key]} {value_text(row['swept'][key])}" for key in keys]
    several = len({other["strategy"] for other in swept}) > 1
    return ", ".join([*([row["strategy"]] if several else []), *parts])
