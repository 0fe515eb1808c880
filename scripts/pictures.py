"""Draw the pictures of README.md and docs/index.md.

python scripts/pictures.py accuracy        docs/accuracy.svg from benchmarks/results/planners.json
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
    width = max(len(line.rstrip()) for line in text.plain.splitlines())
    console = Console(record=True, width=width + 1, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(text, Text(" "), sep="\n", soft_wrap=True)
    console.save_svg(str(DOCS / "plan.svg"), title="zero-recipes plan", code_format=SVG, unique_id="plan")


def accuracy() -> None:
    """A dot for each published peak that a planner answers; its median and its worst in words."""
    results = json.loads((ROOT / "benchmarks" / "results" / "planners.json").read_text())
    matplotlib.rcParams.update({"svg.hashsalt": "accuracy", "font.size": 10})
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.add_subplot()
    for place, (name, (label, color)) in enumerate(PLANNERS.items()):
        ratios = sorted(1 + row[name] for row in results["rows"].values() if name in row)
        heights = [place + 0.06 * (number % 5 - 2) for number in range(len(ratios))]
        axes.scatter(ratios, heights, s=16, color=color, alpha=0.55, linewidths=0)
        found = results["planners"][name]
        words = f"{label}: median error {found['median']:.1%}, worst {found['worst']:+.0%}, {found['rows']} peaks"
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


if __name__ == "__main__":
    plan(sys.stdin.read()) if sys.argv[1:] == ["plan"] else accuracy()
