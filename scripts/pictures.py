"""Draw the pictures of README.md and docs/.

python scripts/pictures.py accuracy        docs/accuracy.svg from benchmarks/results/planners.json
python scripts/pictures.py gpu             docs/gpu.svg from benchmarks/results/gpu_h200.json
python scripts/pictures.py plan < OUTPUT   docs/plan.svg from what `zero-recipes plan` printed (CONTRIBUTING.md)
"""

import json
import re
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
COMMAND = "zero-recipes plan recipes/pythia.yaml --gpus 2 --gpu h100-80gb --price 2.5"
WIDTH = 84  # columns: longer lines are broken
SVG = (  # rich's own would load a font from the network
    '<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg"><style>'
    ".{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace;"
    " font-size: {char_height}px; line-height: {line_height}px; }} {styles}</style><defs>"
    '<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>'
    '</clipPath>{lines}</defs>{chrome}<g transform="translate({terminal_x}, {terminal_y})"'
    ' clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></svg>\n'
)
PLANNERS = {
    "this planner": ("zero-recipes plan", "#3f51b5"),
    "accelerate estimate-memory": ("accelerate estimate-memory", "#a0642e"),
    "DeepSpeed's estimators": ("DeepSpeed's estimators", "#aa4466"),
    "LLaMA-Factory's table": ("LLaMA-Factory's table", "#7a7a7a"),
}


def plan(printed: str) -> None:
    """The answer as a terminal shows it at the end: what a later answer erased is left out."""
    last = re.sub(r".*\x1b\[\d*[AK]|\x1b\[\?25[hl]", "", printed, flags=re.DOTALL).strip("\n")
    text = Text.from_ansi(f"$ {COMMAND}\n\n{last}")
    console = Console(record=True, width=WIDTH, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(text, Text(" "), sep="\n")
    console.save_svg(str(DOCS / "plan.svg"), title="zero-recipes plan", code_format=SVG, unique_id="plan")


def accuracy() -> None:
    """A dot for each published peak that a planner answers; its median error and its two worst in words."""
    results = json.loads((ROOT / "benchmarks" / "results" / "planners.json").read_text())
    matplotlib.rcParams.update({"svg.hashsalt": "accuracy", "font.size": 10})
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.add_subplot()
    for place, (name, (label, color)) in enumerate(PLANNERS.items()):
        ratios = sorted(1 + row[name] for row in results["rows"].values() if name in row)
        heights = [place + 0.06 * (number % 5 - 2) for number in range(len(ratios))]
        axes.scatter(ratios, heights, s=16, color=color, alpha=0.55, linewidths=0)
        found = results["planners"][name]
        worst = f"{found['lowest']:+.0%} and {found['highest']:+.0%}"
        words = f"{label}: median error {found['median']:.1%}, worst {worst}, {found['rows']} peaks"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(
            0.0145, place - 0.32, words, bbox=box, color=color, fontweight="bold" if not place else "normal", zorder=3
        )
    axes.axvline(1, color="#24292f", linewidth=1, zorder=1)
    axes.set(xscale="log", xlim=(0.0135, 25), ylim=(len(PLANNERS) - 0.6, -0.75), yticks=[])
    axes.set_xticks([0.02, 0.1, 0.5, 1, 2, 10, 20], ["0.02", "0.1", "half", "exact", "2x", "10x", "20x"])
    axes.minorticks_off()
    axes.set_xlabel(f"predicted over measured GPU peak ({len(results['rows'])} published by others)")
    axes.spines[["left", "top", "right"]].set_visible(False)
    figure.savefig(DOCS / "accuracy.svg", metadata={"Date": None})


def gpu() -> None:
    """A line for each run that was planned before: planned over measured allocated peak, less one, and both in GB."""
    session = json.loads((ROOT / "benchmarks" / "results" / "gpu_h200.json").read_text())
    rows = [row for row in session["rows"] if "planned_before" in row and "planned_after_the_run" not in row]
    rows.sort(key=lambda row: row["measured"]["allocated_peak_bytes"], reverse=True)
    errors = [planned_over_measured(row, "planned_before") - 1 for row in rows]
    worst = max(errors, key=abs)
    matplotlib.rcParams.update({"svg.hashsalt": "gpu", "font.size": 9})
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    axes = figure.add_subplot()
    for place, (row, error) in enumerate(zip(rows, errors, strict=True)):
        color = "#aa4466" if error == worst else "#3f51b5"
        axes.plot([0, error], [place, place], color=color, linewidth=1.5, zorder=2)
        axes.scatter([error], [place], s=22, color=color, zorder=3)
        planned = row["planned_before"]["allocated_peak_bytes"] / 1e9
        measured = row["measured"]["allocated_peak_bytes"] / 1e9
        words = f"{planned:.1f} GB planned, {measured:.1f} measured"
        axes.text(0.163, place, words, va="center", ha="right", color=color)
        if error == worst:
            words = f"worst: {error:+.1%}"
            axes.text(error, place - 0.5, words, va="center", ha="right", color=color, fontweight="bold")
    later = [row for row in rows if "planned_now" in row]
    if later:
        now = [planned_over_measured(row, "planned_now") - 1 for row in later]
        places = [rows.index(row) for row in later]
        axes.scatter(now, places, s=22, facecolors="white", edgecolors="#24292f", zorder=4, label="corrected plan")
        axes.legend(loc="lower left", bbox_to_anchor=(0.3, 0), frameon=False)
    axes.axvline(0, color="#24292f", linewidth=1, zorder=1)
    axes.set(xlim=(-0.05, 0.165), ylim=(len(rows) - 0.4, -0.9))
    axes.set_yticks(range(len(rows)), [name_of(row) for row in rows])
    axes.set_xticks([-0.05, 0, 0.05, 0.1], ["-5 %", "exact", "+5 %", "+10 %"])
    axes.set_xlabel(f"planned over measured allocated peak, {len(rows)} runs on one NVIDIA H200")
    axes.tick_params(axis="y", length=0)
    axes.spines[["left", "top", "right"]].set_visible(False)
    figure.savefig(DOCS / "gpu.svg", metadata={"Date": None})


def planned_over_measured(row: dict, plan: str) -> float:
    return row[plan]["allocated_peak_bytes"] / row["measured"]["allocated_peak_bytes"]


def name_of(row: dict) -> str:
    """Model and strategy of a run, what is special in it, and how many ranks shared the GPU."""
    family, size = row["model"].split("-")
    ranks = f"{row['world_size']} ranks" if row["world_size"] > 1 else ""
    words = [f"{family.title()}-{size.upper()} {row['strategy']}", row["words"], ranks]
    return ", ".join(word for word in words if word)


if __name__ == "__main__":
    if sys.argv[1:] == ["plan"]:
        plan(sys.stdin.read())
    else:
        {"accuracy": accuracy, "gpu": gpu}[sys.argv[1]]()
