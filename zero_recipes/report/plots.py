"""The three pictures of a comparison, and one per single run. Sizes in bytes come in, PNG files go out.

Figures are built without pyplot: nothing global is touched and no display is looked for.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, NullFormatter

from zero_recipes.core import units
from zero_recipes.core.plot_style import ALARM, DPI, ELSEWHERE, FAINT, INK, PART_COLOURS, STYLE
from zero_recipes.metrics.read_runs import MeasuredRun
from zero_recipes.report import rows

BARS_INCHES = (8.0, 4.8)
LOSS_INCHES = (8.0, 6.0)

STRATEGIES = {"ddp": "#7a7a7a", "zero0": "#cc4b58", "zero1": "#e0a030", "zero2": "#2a9d8f", "zero3": "#33608c"}

OTHERS = ("#8e5ea2", "#a0642e", "#7fa653", "#c77cb0", "#4f4f87")


def draw_comparison(runs: Sequence[MeasuredRun], folder: Path) -> dict[str, Path]:
    """Write staircase.png, throughput.png and loss.png for the rows of the comparison; none if there are no rows."""
    compared = rows.comparison(runs)
    if not compared:
        return {}
    return {
        "staircase": _save(folder / "staircase.png", BARS_INCHES, lambda figure: _staircase(figure, compared)),
        "throughput": _save(folder / "throughput.png", BARS_INCHES, lambda figure: _throughput(figure, compared)),
        "loss": _save(folder / "loss.png", LOSS_INCHES, lambda figure: _losses(figure, compared)),
    }


def draw_single(run: MeasuredRun, folder: Path) -> Path | None:
    """Write run_<folder>.png with the losses of training and evaluation; None where nothing was trained."""
    if not run.loss_history:
        return None
    return _save(folder / f"run_{run.folder.name}.png", BARS_INCHES, lambda figure: _one_loss(figure, run))


def _save(path: Path, inches: tuple[float, float], draw: Callable[[Figure], None]) -> Path:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=inches, dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        figure.savefig(path)
    return path


def _staircase(figure: Figure, runs: Sequence[MeasuredRun]) -> None:
    """Stacked model states of the fullest rank, in grey on top what lies on host and disk; beside them the peak, where
    an accelerator measured one."""
    axes = figure.subplots()
    _title(axes, "Model states on the fullest rank", runs)
    peaks = [rows.peak_allocated(run) for run in runs]
    with_peaks = any(peaks)
    highest = max((_tallest(run) for run in runs), default=0)
    unit, one = units.unit_of(highest)
    width, shift = (0.4, 0.21) if with_peaks else (0.56, 0.0)
    for place, (run, peak) in enumerate(zip(runs, peaks, strict=True)):
        _state_bar(axes, run, place - shift if peak else place, width, one, len(runs))
        if peak:
            axes.bar(place + shift, peak / one, width - 0.04, fill=False, edgecolor=INK, linewidth=1.1)
            _above(axes, place + shift, peak / one, units.significant(peak / one), len(runs))
    axes.set_ylabel(f"memory of one rank in {unit}")
    _from_zero(axes, 1.12 * highest / one)
    _strategy_axis(axes, runs, [rows.largest_rank(run) is None for run in runs])
    elsewhere = [part for part in ELSEWHERE if any(_bytes_in(run, part) for run in runs)]
    _staircase_legend(axes, elsewhere, with_peaks)


def _tallest(run: MeasuredRun) -> float:
    """Highest of the things that are drawn for a run, in bytes."""
    expected = rows.textbook(run)
    stacked = sum(_bytes_in(run, part) for part in (*PART_COLOURS, *ELSEWHERE))
    return max(stacked, rows.peak_allocated(run) or 0, expected.total if expected else 0)


def _bytes_in(run: MeasuredRun, part: str) -> int:
    """Of PARTS and ELSEWHERE, on the rank that holds most."""
    return getattr(rows.largest_rank(run), part, 0) or 0


def _state_bar(axes: Axes, run: MeasuredRun, place: float, width: float, one: int, bars: int) -> None:
    """One stacked bar with its total on top, wherever it lies, and the textbook's total as a mark across it."""
    rank, expected = rows.largest_rank(run), rows.textbook(run)
    bottom = 0.0
    for part, colour in {**PART_COLOURS, **{part: colour for part, (_, colour) in ELSEWHERE.items()}}.items():
        height = _bytes_in(run, part) / one
        axes.bar(place, height, width, bottom=bottom, color=colour, edgecolor="white", linewidth=0.6)
        bottom += height
    top = bottom
    if expected:
        top = max(top, expected.total / one)
        outline = [withStroke(linewidth=4.5, foreground="white")]
        ends = (place - width / 2, place + width / 2)
        axes.plot(ends, [expected.total / one] * 2, color=INK, lw=2, solid_capstyle="butt", path_effects=outline)
    if rank:
        _above(axes, place, top, units.significant(bottom), bars)
    else:
        _absent(axes, place, run)


def _staircase_legend(axes: Axes, elsewhere: Sequence[str], with_peaks: bool) -> None:
    for label, colour in (*PART_COLOURS.items(), *(ELSEWHERE[part] for part in elsewhere)):
        axes.bar(0, 0, color=colour, label=label)
    if with_peaks:
        axes.bar(0, 0, fill=False, edgecolor=INK, linewidth=1.1, label="peak allocated")
    axes.plot([], [], color=INK, lw=2, label="textbook total")
    axes.figure.legend(loc="outside lower center", ncols=6)


def _throughput(figure: Figure, runs: Sequence[MeasuredRun]) -> None:
    """Non-padding tokens per second over all ranks, with the share of the baseline on top."""
    axes = figure.subplots()
    reference = rows.baseline(runs)
    _title(axes, "Throughput", runs)
    for place, (run, colour) in enumerate(zip(runs, colours(runs), strict=True)):
        speed = rows.speed(run)
        if speed is None:
            _absent(axes, place, run)
            continue
        axes.bar(place, speed, 0.62, color=colour)
        share = rows.relative_speed(run, reference)
        label = units.count(speed) if share is None else f"{units.count(speed)}\n{units.percent(share)}"
        _above(axes, place, speed, label, len(runs))
    fastest = max((rows.speed(run) or 0 for run in runs), default=0)
    _from_zero(axes, 1.16 * fastest)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if fastest >= 10 else f"{value:g}")
    axes.set_ylabel("non-padding tokens per second, all ranks")
    _strategy_axis(axes, runs, [rows.speed(run) is None for run in runs])
    if reference:
        axes.set_xlabel(f"percentages: relative to {reference.label}", fontsize=9.5)


def _losses(figure: Figure, runs: Sequence[MeasuredRun]) -> None:
    """All losses over each other, and below how far each lies from the baseline, on a log scale."""
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _title(upper, "Training loss", runs)
    trained = [(run, colour) for run, colour in zip(runs, colours(runs), strict=True) if run.loss_history]
    for index, (run, colour) in enumerate(trained):
        steps, dashes = _steps(run.loss_history), _dashes(index, len(trained))
        upper.plot(steps, run.loss_history, color=colour, lw=0.9, zorder=1)  # holds the dashes together
        upper.plot(steps, run.loss_history, color=colour, lw=2.2, ls=dashes, zorder=2)
    upper.set_ylabel("loss")
    upper.grid(axis="y", color=FAINT, lw=0.8)
    # Solid in the legend: a sample of a dashed line may fall into its gap.
    samples = [Line2D([], [], color=colour, lw=2.2, label=_label(run)) for run, colour in trained]
    upper.legend(handles=samples, ncols=2 if len(samples) > 4 else 1, loc="upper right")
    base = rows.baseline(runs) or next((run for run, _ in trained), None)
    _differences(lower, base, trained)
    lower.set_xlabel("optimizer step")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))


def _dashes(index: int, lines: int) -> tuple[float, tuple[float, float]] | str:
    """A solid line for the first curve, and for the others dashes that take turns where the curves coincide."""
    if index == 0:
        return "-"
    dash = 5.0  # in line widths
    return (-dash * (index - 1), (dash, dash * (lines - 1)))


def _differences(axes: Axes, base: MeasuredRun | None, trained: list[tuple[MeasuredRun, str]]) -> None:
    """Lines of |loss - baseline loss|; steps that agree to the last bit have no place on a log scale."""
    remarks: dict[str, list[str]] = {"equal at every step": [], "not finite": []}
    drawn: list[float] = []
    for run, colour in trained:
        if base is None or run is base:
            continue
        gaps = [abs(a - b) for a, b in zip(run.loss_history, base.loss_history or [], strict=False)]
        shown = [gap if gap > 0 else math.nan for gap in gaps]
        if not all(map(math.isfinite, gaps)):
            remarks["not finite"].append(run.label)
        elif not any(gaps):
            remarks["equal at every step"].append(run.label)
        axes.plot(_steps(shown), shown, color=colour, lw=1.3, marker=".", ms=4)
        drawn += [gap for gap in shown if math.isfinite(gap)]
    axes.set_ylabel(f"|loss - {base.label}|" if base else "")
    if drawn:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")  # the scale's own writes mathtext, which STYLE does not read
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(10 ** math.floor(math.log10(min(drawn))), 10 ** math.ceil(math.log10(max(drawn) * 1.01)))
        axes.grid(axis="y", color=FAINT, lw=0.8)
    else:
        axes.set_yticks([])
    said = "; ".join(f"{remark}: {', '.join(names)}" for remark, names in remarks.items() if names)
    axes.set_title(said or ("" if drawn else "nothing to compare"), fontsize=9.5)


def _one_loss(figure: Figure, run: MeasuredRun) -> None:
    """Training loss of one run, with the evaluation losses as dots on a line."""
    axes = figure.subplots()
    _title(axes, f"Training loss of {run.label}", [run])
    axes.plot(_steps(run.loss_history), run.loss_history, color=STRATEGIES["zero3"], lw=1.2, label="training")
    if run.eval_history:
        steps, losses = [entry.step for entry in run.eval_history], [entry.loss for entry in run.eval_history]
        axes.plot(steps, losses, color=STRATEGIES["zero0"], lw=1.6, marker="o", ms=5, label="evaluation")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=FAINT, lw=0.8)
    axes.legend()


def colours(runs: Sequence[MeasuredRun]) -> list[str]:
    """One colour per run: the five strategies always have theirs, further ones take the next free one."""
    others = [run.label for run in runs if run.label not in STRATEGIES]
    return [STRATEGIES.get(run.label) or OTHERS[others.index(run.label) % len(OTHERS)] for run in runs]


def _title(axes: Axes, text: str, runs: Sequence[MeasuredRun]) -> None:
    axes.set_title(text, loc="left", fontweight="bold", fontsize=12.5, pad=25)
    axes.annotate(rows.setting(runs), (0, 1), xycoords="axes fraction", xytext=(0, 8), textcoords="offset points",
                  fontsize=9.5, color="#57606a", ha="left", va="bottom", annotation_clip=False)  # fmt: skip


def _strategy_axis(axes: Axes, runs: Sequence[MeasuredRun], absent: Sequence[bool]) -> None:
    """Names under the bars, broken at underscores so that long ones do not meet; an `absent` bar says itself why."""
    names = [run.label if no_bar else _label(run) for run, no_bar in zip(runs, absent, strict=True)]
    labels = [name.replace("_", "\n").replace(" ", "\n") for name in names]
    axes.set_xticks(range(len(runs)), labels, fontsize=10 if len(runs) <= 6 else 9)
    spare = max(0, 4 - len(runs)) / 2  # two bars alone would look like walls
    axes.set_xlim(-0.6 - spare, len(runs) - 0.4 + spare)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", color=FAINT, lw=0.8)


def _from_zero(axes: Axes, top: float) -> None:
    """Bars stand on zero; where nothing was measured the axis has no numbers."""
    axes.set_ylim(0, top or 1)
    if not top:
        axes.set_yticks([])


def _above(axes: Axes, place: float, height: float, text: str, bars: int) -> None:
    axes.annotate(text, (place, height), xytext=(0, 3), textcoords="offset points", ha="center", va="bottom",
                  fontsize=9.5 if bars <= 6 else 8)  # fmt: skip


def _absent(axes: Axes, place: float, run: MeasuredRun) -> None:
    """Where a bar would stand: why there is none."""
    words = {"oom": "out of memory", "ok": "not measured"}.get(run.status, run.status)
    axes.annotate(words, (place, 0), xytext=(0, 6), textcoords="offset points", rotation=90, ha="center",
                  va="bottom", color=ALARM, fontsize=9.5)  # fmt: skip


def _label(run: MeasuredRun) -> str:
    return run.label if run.status == "ok" else f"{run.label} ({run.status})"


def _steps(values: Sequence[float]) -> range:
    """Optimizer steps count from 1."""
    return range(1, len(values) + 1)
