"""Write docs/choice.svg, the flow chart of the rules that `plan` follows, and the tables of docs/choice.md.

    python scripts/choice_chart.py [--check]    # --check: exits 1 if one of them is another

Boxes and arrows are plan/recommend.py's PLACES; numbers are the planner's formulas, which are theory/'s.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from zero_recipes.core.tables import Column, markdown_columns  # noqa: E402
from zero_recipes.core.units import size  # noqa: E402
from zero_recipes.metrics.prediction import Prediction  # noqa: E402
from zero_recipes.plan import jobs  # noqa: E402
from zero_recipes.plan.formulas.predict import predict_by_formulas  # noqa: E402
from zero_recipes.plan.recommend import PLACES, Place  # noqa: E402
from zero_recipes.theory.zero_paper import PLUS_PLUS, model_state_bytes, paper_volume, plus_plus_units  # noqa: E402

PAGE, CHART = ROOT / "docs" / "choice.md", ROOT / "docs" / "choice.svg"
RECIPE = Path("recipes/pythia.yaml")
NODES, HERE = 2, 8  # of the table: machines, GPUs in each
NOTHING = "The mildest change: recompute, smaller micro batches, LoRA; else more GPUs"
MOST = "The one of them that leaves most of each GPU"
LABELS = {"zero3": "zero3, or fsdp2"}

WIDTH, BOX, HIGH, LEAF, STEP, ROW, PER_ROW = 1200, 212, 68, 32, 234, 176, 4
LEFT, FIRST, TOP, ENTRY = 14, 246, 14, 186
HEAD = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {{height}}" width="{WIDTH}" height="{{height}}"
 font-family="DejaVu Sans, Verdana, Arial, sans-serif" font-size="12.5">
<title>From model, GPUs, host memory, NVMe and network to a strategy</title>
<defs><marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path d="M0 0 L8 4 L0 8 z" fill="#444"/></marker></defs>
<rect width="100%" height="100%" fill="#fff"/>
"""


@dataclass(frozen=True)
class Leaf:
    """`strategies`: those that it may mean; empty where none fits."""

    words: str
    strategies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Node:
    """A question of the chart. `place`, `strategy`: whom it is about (`strategy` is None for a place's own)."""

    question: str
    place: Place
    strategy: str | None
    yes: Node | Leaf
    no: Node | Leaf


def chart() -> Node:
    """The rules as a chart: its first question."""
    below: Node | Leaf = Leaf(NOTHING)
    for place in reversed(PLACES):
        step: Node | Leaf = Leaf(MOST, place.leaves_most)
        for rule in reversed(place.rules):
            leaf = Leaf(LABELS.get(rule.strategy, rule.strategy), (rule.strategy,))
            step = Node(rule.question, place, rule.strategy, leaf, step)
        below = Node(place.question, place, None, step, below)
    return below


def walk(answer: Callable[[Node], bool]) -> Leaf:
    """Where a reader ends who gives these answers."""
    at: Node | Leaf = chart()
    while isinstance(at, Node):
        at = at.yes if answer(at) else at.no
    return at


def drawn() -> str:
    parts, at, y = [], chart(), TOP
    while isinstance(at, Node):
        steps = list(_chain(at.yes))
        rows = -(-len(steps) // PER_ROW)
        parts += [_box(LEFT, y, ENTRY, HIGH + 16, at.question, "#e7eefc", bold=True)]
        parts += [_arrow([(LEFT + ENTRY, y + HIGH / 2), (FIRST, y + HIGH / 2)], "yes")]
        parts += _row_boxes(steps, y)
        below = y + rows * ROW
        parts += [_arrow([(LEFT + ENTRY / 2, y + HIGH + 16), (LEFT + ENTRY / 2, below)], "no")]
        at, y = at.no, below
    parts.append(_box(LEFT, y, 3 * ENTRY, LEAF, at.words, "#fbeaea"))
    return HEAD.format(height=y + LEAF + TOP) + "".join(parts) + "</svg>\n"


def _chain(at: Node | Leaf) -> Iterator[Node | Leaf]:
    while isinstance(at, Node):
        yield at
        at = at.no
    yield at


def _row_boxes(steps: Sequence[Node | Leaf], top: float) -> Iterator[str]:
    for index, step in enumerate(steps):
        x, y = FIRST + STEP * (index % PER_ROW), top + ROW * (index // PER_ROW)
        if isinstance(step, Leaf):
            yield _box(x, y, BOX, HIGH, step.words, "#e6f4e6")
            continue
        yield _box(x, y, BOX, HIGH, step.question, "#f7f7f7")
        yield _arrow([(x + BOX / 2, y + HIGH), (x + BOX / 2, y + HIGH + 28)], "yes")
        yield _box(x, y + HIGH + 28, BOX, LEAF, step.yes.words, "#e6f4e6", bold=True)
        if index % PER_ROW < PER_ROW - 1:
            yield _arrow([(x + BOX, y + HIGH / 2), (x + STEP, y + HIGH / 2)], "no")
        else:
            edge, turn, start = WIDTH - 8, y + ROW - 24, FIRST + BOX / 2
            bends = [(x + BOX, y + HIGH / 2), (edge, y + HIGH / 2), (edge, turn), (start, turn), (start, y + ROW)]
            yield _arrow(bends, "no")


def _box(x: float, y: float, width: float, height: float, words: str, fill: str, bold: bool = False) -> str:
    lines = textwrap.wrap(words, int(width / (8.6 if bold else 7.1)))
    first = y + height / 2 - 7.5 * (len(lines) - 1) + 4.5
    weight = ' font-weight="bold"' if bold else ""
    written = "".join(
        f'<tspan x="{x + width / 2:g}" y="{first + 15 * index:g}">{escape(line)}</tspan>'
        for index, line in enumerate(lines)
    )
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="#777"/>'
        f'<text text-anchor="middle"{weight}>{written}</text>\n'
    )


def _arrow(points: Sequence[tuple[float, float]], word: str) -> str:
    path = " L".join(f"{x:g} {y:g}" for x, y in points)
    (x, y), (to_x, _) = points[:2]
    at = (x + 3, y - 5) if to_x > x else (x + 5, y + 17)
    return (
        f'<path d="M{path}" fill="none" stroke="#444" marker-end="url(#end)"/>'
        f'<text x="{at[0]:g}" y="{at[1]:g}" font-size="11" fill="#444">{word}</text>\n'
    )


# (right when, wrong when) of each strategy of `--strategies all`
WORDS = {
    "ddp": ("everything fits on each GPU", "the states of one copy are most of the GPU"),
    "zero0": ("DDP in DeepSpeed, to compare with", "memory counts: it holds more than DDP in 16 bits"),
    "zero1": ("gradients fit whole; long accumulation, slow network", "gradients whole are too much"),
    "zero2": ("weights fit whole on each GPU", "long accumulation on a slow network: it reduces in each micro step"),
    "zero3": ("the weights do not fit whole", "a lower stage fits with room: it communicates less"),
    "zero2_offload": ("weights fit, the optimizer does not; host memory is there", "steps count: Adam runs on the CPU"),
    "zero3_offload": ("not even shares fit on the GPUs", "steps count; host memory below 20 bytes a parameter"),
    "zero3_hpz": ("several nodes, slow network, room for a second copy", "one node (refused); with offload (refused)"),
    "zero3_qwz": ("several nodes, slow network, no room for the second copy", "weights must be gathered exactly"),
    "zero3_qgz": ("several nodes, gradients are what is slow", "one node; gradients must be summed exactly"),
    "zero3_plus_plus": ("several nodes, the network decides", "one node (refused); rounding is not acceptable"),
    "fsdp2": ("torch alone, without DeepSpeed", "offload, long accumulation, another number of GPUs later"),
    "zero3_offload_infinity": ("host memory holds all but the weights", "without a local NVMe; checkpoints to resume"),
    "zero3_infinity": ("nothing else holds the states", "any other fits; checkpoints to resume (refused)"),
    "zero2_bf16_states": ("10 bytes a parameter must do", "the losses of fp32 masters are wanted"),
    "zero3_bf16_states": ("10 bytes a parameter must do, shared out", "the losses of fp32 masters are wanted"),
    "zero2_autocast": ("DDP's arithmetic at stage 2 (--bf16 false)", "memory counts: 20 bytes a parameter"),
}
# model, GPUs, GB of each, the stage that is named for it (0: DDP)
MISLEADING = (
    ("meta-llama/Llama-2-13b-hf", 2, 80, 2),
    ("meta-llama/Llama-2-70b-hf", 8, 80, 3),
    ("meta-llama/Llama-2-7b-hf", 2, 40, 3),
    ("meta-llama/Llama-2-13b-hf", 8, 40, 2),
    ("EleutherAI/pythia-2.8b-deduped", 2, 40, 0),
)


def strategy_table() -> str:
    once = ["--gradient_accumulation_steps", "1"]
    recipe, in_fp32 = (jobs.read_recipe(ROOT / RECIPE, [*once, *more]) for more in ([], ["--bf16", "false"]))
    config = jobs.model_config(recipe.settings)
    rows = []
    for name, ds_config in jobs.read_strategies(recipe, ["all"], ROOT / jobs.CONFIGS).items():
        own = in_fp32 if name == "zero2_autocast" else recipe
        job = jobs.job_of(own, config, name, ds_config, NODES * HERE, HERE)
        rows.append((name, predict_by_formulas(job)))
    named = [Column("Strategy", lambda row: f"`{row[0]}`"), Column("Right when", lambda row: WORDS[row[0]][0])]
    named.append(Column("Wrong when", lambda row: WORDS[row[0]][1]))
    others = [
        Column("States on a GPU", lambda row: _size(row[1].state_bytes)),
        Column("Host memory a node", lambda row: _size(row[1].host_bytes.training)),
        Column("NVMe a node", lambda row: _size(row[1].nvme_bytes)),
        Column("Moved in a step", lambda row: f"{_moved(row[1]):.2f} Φ"),
        Column("Between nodes", lambda row: f"{_between_nodes(*row):.2f} Φ"),
    ]
    return markdown_columns(named, others, rows)


def _size(held: int) -> str:
    return size(held) if held else "-"


def _moved(prediction: Prediction) -> float:
    return paper_volume(prediction.communication_bytes_per_step) / (2 * prediction.parameters)


def _between_nodes(name: str, prediction: Prediction) -> float:
    return plus_plus_units(**PLUS_PLUS[name]) if name in PLUS_PLUS else _moved(prediction)


def misleading_table() -> str:
    lines = ["| Model | GPUs | Rule | States on a GPU, before activations |", "| --- | --- | --- | ---: |"]
    for model, count, capacity, stage in MISLEADING:
        needs = model_state_bytes(jobs.known_models()[model]["parameters"], count, stage).total
        rule = f"stage {stage}" if stage else "DDP"
        lines.append(f"| {model.rpartition('/')[2]} | {count} x {capacity} GB | {rule} | {size(int(needs))} |")
    return "\n".join(lines) + "\n"


def rules_in_words() -> str:
    lines = []
    for index, place in enumerate(PLACES, 1):
        lines.append(f"{index}. {place.question} If so:")
        lines += [f"    - {rule.question} `{rule.strategy}`." for rule in place.rules]
        lines.append(f"    - Else: {MOST[0].lower()}{MOST[1:]}.")
    return "\n".join([*lines, f"{len(PLACES) + 1}. {NOTHING}."]) + "\n"


def page(text: str) -> str:
    """`text` with its generated parts as they are now."""
    for name, part in (("table", strategy_table()), ("misleading", misleading_table()), ("rules", rules_in_words())):
        pattern = rf"(<!-- {name}: begin[^>]*-->\n).*?(<!-- {name}: end -->)"
        text = re.sub(pattern, lambda found, part=part: f"{found[1]}\n{part}\n{found[2]}", text, flags=re.DOTALL)
    return text


def main(arguments: list[str]) -> int:
    made = {CHART: drawn(), PAGE: page(PAGE.read_text())}
    if "--check" in arguments:
        return int(any(path.read_text() != text for path, text in made.items()))
    for path, text in made.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
