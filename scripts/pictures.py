"""Draw the pictures of README.md and docs/.

python scripts/pictures.py accuracy   docs/accuracy.svg from benchmarks/results/planners.json
python scripts/pictures.py gpu        docs/gpu.svg from benchmarks/results/gpu_h200.json
python scripts/pictures.py plans      docs/plan*.svg: runs `zero-recipes plan` twice for each of PLANS, some minutes
python scripts/pictures.py shares     docs/lesson/shares.svg from the ZeRO paper's formulas
python scripts/pictures.py choice     docs/choice.svg from QUESTIONS
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from zero_recipes.core.zero_paper import model_state_bytes  # noqa: E402

DOCS = ROOT / "docs"
PLANS = {
    "plan-lora": "zero-recipes plan recipes/qwen3-4b-lora.yaml --gpus 1 --gpu 4090 --price 0.5",
    "plan": "zero-recipes plan recipes/pythia.yaml --gpus 2 --gpu h100-80gb --price 2.5",
}
WIDTHS = {"": 76, "-narrow": 46}  # columns of the terminal; the narrow one is for telephones
MARGIN = 6  # columns: lines that are no table may be longer than the terminal
SVG = (  # rich's own would load a font from the network
    '<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg"><style>'
    ".{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace;"
    " font-size: {char_height}px; line-height: {line_height}px; }} {styles}</style><defs>"
    '<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>'
    '</clipPath>{lines}</defs>{chrome}<g transform="translate({terminal_x}, {terminal_y})"'
    ' clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></svg>\n'
)
PYTHIA = 6_857_302_016  # parameters
# part of the model states: the stage that shards it, bytes per parameter, color
STATES = {
    "parameters": (3, 2, "#3b75af"),
    "gradients": (2, 2, "#df8a2c"),
    "optimizer states": (1, 12, "#4f9a57"),
}
ELSEWHERE = "#eeeff1"
# how the plan chooses (tools/plan/choose.py): a question, and what to take if the answer is yes. What follows one that
# fits and is as fast as any is not asked.
QUESTIONS = (
    ("Does ddp fit on each GPU,\nas fast as any that fits?", "ddp"),
    ("zero2? zero1?", "zero2, zero1"),
    ("zero3? fsdp2?", "zero3, fsdp2"),
    ("Several machines: ZeRO++?", "zero3_hpz first"),
    ("Nothing fits so far: does host\nmemory take the optimizer?", "zero2_offload"),
    ("Also the weights?", "zero3_offload"),
    ("Does NVMe take the rest?", "Infinity"),
)
LAST_RESORT = "the smallest change that fits: recomputation,\nsmaller micro batches, LoRA, or more GPUs"
PLANNERS = {
    "this planner": ("zero-recipes plan", "#3f51b5"),
    "accelerate estimate-memory": ("accelerate estimate-memory", "#a0642e"),
    "DeepSpeed's estimators": ("DeepSpeed's estimators", "#aa4466"),
    "LLaMA-Factory's table": ("LLaMA-Factory's table", "#7a7a7a"),
}


def plans() -> None:
    """Each answer as a terminal shows it at the end, in a wide and in a narrow terminal."""
    for name, command in PLANS.items():
        for suffix, width in WIDTHS.items():
            environment = os.environ | {"COLUMNS": str(width), "FORCE_COLOR": "1"}
            arguments = [*command.split(), "--seconds", "3600"]  # so that the engine is simulated on slow machines, too
            ended = subprocess.run(arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            terminal(f"{name}{suffix}", command, ended.stdout, width + MARGIN)


def terminal(name: str, command: str, printed: str, width: int) -> None:
    """Draw docs/`name`.svg: a command and what it printed last. What a later answer erased is left out."""
    last = re.sub(r".*\x1b\[\d*[AK]|\x1b\[\?25[hl]", "", printed, flags=re.DOTALL).strip("\n")
    text = Text.from_ansi(f"$ {command}\n\n{last}")
    console = Console(record=True, width=width, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(text, Text(" "), sep="\n")
    console.save_svg(str(DOCS / f"{name}.svg"), title="zero-recipes plan", code_format=SVG, unique_id=name)


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


def shares() -> None:
    """What each of four GPUs holds of Pythia-6.9B at each stage: a panel for each stage, a block for each GPU.

    Letters are large, so that the picture can be read on a telephone without scrolling.
    """
    gpus = 4
    matplotlib.rcParams.update({"svg.hashsalt": "shares", "font.size": 12})
    figure = Figure(figsize=(5.6, 6.2), layout="constrained")
    panels = figure.subplots(2, 2).flat
    for stage, axes in enumerate(panels):
        size = model_state_bytes(PYTHIA, gpus, stage).total / 1e9
        axes.set_title(f"stage {stage}: {size:.1f} GB", fontsize=13, fontweight="bold", loc="left")
        for gpu in range(gpus):
            bottom = 0
            for lowest_stage, height, color in reversed(STATES.values()):
                for quarter in range(gpus):
                    is_here = stage < lowest_stage or quarter == gpu
                    shown = color if is_here else ELSEWHERE
                    left = gpu * (gpus + 0.6) + quarter
                    axes.bar(left, height, 1, bottom, align="edge", color=shown, edgecolor="#444444")
                bottom += height
            axes.text(gpu * (gpus + 0.6) + gpus / 2, -1.6, f"GPU {gpu}", ha="center", fontsize=11)
        axes.set(xlim=(-0.2, gpus * (gpus + 0.6)), ylim=(-2, bottom + 0.1))
        axes.axis("off")
    colors = {name: color for name, (_, _, color) in STATES.items()} | {"on another GPU": ELSEWHERE}
    keys = [Patch(facecolor=color, edgecolor="#444444", label=name) for name, color in colors.items()]
    figure.legend(handles=keys, loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(DOCS / "lesson" / "shares.svg", metadata={"Date": None})


def choice() -> None:
    """The plan's questions from top to bottom, beside each what to take. Letters are large, as in `shares`."""
    matplotlib.rcParams.update({"svg.hashsalt": "choice", "font.size": 12})
    figure = Figure(figsize=(5.6, 6.2))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 10), ylim=(-len(QUESTIONS) - 0.5, 0.5))
    axes.axis("off")
    box = {"boxstyle": "round,pad=0.4", "facecolor": "#e7eefc", "edgecolor": "#777777"}
    green = box | {"facecolor": "#e6f4e6"}
    arrow = {"arrowstyle": "->", "color": "#444444"}
    left = 3.2
    right = 8.3
    for place, (question, answer) in enumerate(QUESTIONS):
        axes.text(left, -place, question, ha="center", va="center", bbox=box, zorder=3)
        axes.text(right, -place, answer, ha="center", va="center", bbox=green, fontweight="bold", zorder=3)
        axes.annotate("", (6.8, -place), (left, -place), arrowprops=arrow, zorder=1)
        axes.text(6.45, -place + 0.08, "yes", ha="center", color="#444444", fontsize=10)
        axes.annotate("", (left, -place - 0.7), (left, -place), arrowprops=arrow, zorder=1)
        axes.text(left + 0.15, -place - 0.58, "no", color="#444444", fontsize=10)
    axes.text(4.9, -len(QUESTIONS), LAST_RESORT, ha="center", va="center", bbox=green, fontweight="bold", zorder=3)
    figure.savefig(DOCS / "choice.svg", metadata={"Date": None})


def planned_over_measured(row: dict, plan: str) -> float:
    return row[plan]["allocated_peak_bytes"] / row["measured"]["allocated_peak_bytes"]


def name_of(row: dict) -> str:
    """Model and strategy of a run, what is special in it, and how many ranks shared the GPU."""
    family, size = row["model"].split("-")
    ranks = f"{row['world_size']} ranks" if row["world_size"] > 1 else ""
    words = [f"{family.title()}-{size.upper()} {row['strategy']}", row["words"], ranks]
    return ", ".join(word for word in words if word)


if __name__ == "__main__":
    {"accuracy": accuracy, "gpu": gpu, "plans": plans, "shares": shares, "choice": choice}[sys.argv[1]]()
