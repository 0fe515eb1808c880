"""Write what README and the pages show of the demo, and the table of our own recipe keys: python scripts/readme_demo.py

A folder (output/demo) given: its results are copied into docs/demo first. --check: exits 1 if a part is another.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = ("report.json", "report.md", "staircase.png", "throughput.png", "loss.png")
DEMO = ROOT / "docs" / "demo"
README = ROOT / "README.md"
DEMO_PAGE = ROOT / "docs" / "demo.md"
RECIPE_PAGE = ROOT / "docs" / "recipe.md"
sys.path.insert(0, str(ROOT))


def machine() -> str:
    hardware = json.loads((DEMO / "full" / "metrics.json").read_text())["hardware"]
    return f"{hardware['cpu']}, {hardware['cpu_cores']} cores, no GPU"


def short_part() -> str:
    """README's table: of every strategy what a reader compares first."""
    from zero_recipes.core import tables, units

    rows = [row for row in json.loads((DEMO / "report.json").read_text())["rows"] if row["compared"]]
    sizes = {(row["parameters"], row["world_size"], row["precision"]) for row in rows}
    ((parameters, processes, precision),) = sizes
    columns = [
        tables.Column(
            "Model states of a process",
            lambda row: f"{units.size(row['state_bytes'])}, {row['state_bytes'] / parameters:.0f} bytes a parameter",
        ),
        tables.Column("Tokens/s", lambda row: units.count(row["tokens_per_second"])),
        tables.Column("Sent in a step", lambda row: units.size(row["communication_bytes"])),
        tables.Column("Final loss", lambda row: units.fixed(row["final_loss"], 4)),
    ]
    table = tables.markdown_columns([tables.Column("Strategy", lambda row: row["label"])], columns, rows).strip()
    said = (
        f"{units.parameters(parameters)} parameters in {precision}, {rows[0]['steps']} steps on {processes} processes "
        f"({machine()}). Bytes carry over to GPUs; times do not:"
    )
    return f"\n{textwrap.fill(said, 120)}\n\n{table}\n\n"


def demo_part() -> str:
    """The page's section on the demo, from docs/demo alone."""
    full = json.loads((DEMO / "full" / "metrics.json").read_text())
    row = json.loads((DEMO / "report.json").read_text())["rows"][0]
    samples = [json.loads(line) for line in (DEMO / "full" / "samples.jsonl").read_text().splitlines()]
    names = list(samples[0]["scores_after"])
    before, after = (
        {name: sum(sample[key][name] for sample in samples) / len(samples) for name in names}
        for key in ("scores_before", "scores_after")
    )
    scores = ", ".join(f"{name.replace('_', ' ')} {before[name]:.3f} to {after[name]:.3f}" for name in names)
    table = (DEMO / "report.md").read_text().strip()
    examples = "\n".join(
        f"| {question(sample['prompt'])} | {sample['before']} | {sample['after']} |" for sample in samples[:4]
    )
    return f"""
{row["world_size"]} processes on CPUs ({machine()}), {row["parameters"]:,} parameters, {row["steps"]} steps for each
strategy. Model-state bytes carry over to GPUs; times do not.

{table}

![Memory of the model states under each strategy, part by part](demo/staircase.png)

![Loss over the steps of each strategy](demo/loss.png)

![Tokens a second under each strategy](demo/throughput.png)

The full run (ZeRO-2, {len(full["loss_history"])} steps): over {len(samples)} held-out prompts {scores}.

| prompt | before | after |
|---|---|---|
{examples}

"""


def keys_part() -> str:
    """The table of the recipe keys that TRL does not have."""
    from zero_recipes.config.recipe_keys import RecipeArguments

    lines = ["", "| key | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(RecipeArguments):
        default = "unset" if field.default is None else str(field.default).lower()
        lines.append(f"| `{field.name}` | {default} | {field.metadata['help']} |")
    return "\n".join([*lines, "", ""])


def question(prompt: str) -> str:
    """A prompt without Alpaca's wrapper, on one line."""
    inside = prompt.partition("### Instruction:\n")[2].removesuffix("### Response:\n").strip()
    return inside.replace("\n\n### Input:\n", " ")


def with_part(text: str, name: str, part: str) -> str:
    """A page with the part between the markers of `name` replaced. Raises ValueError where it has none."""
    pattern = rf"(<!-- {name}: begin[^\n]*-->\n).*?(<!-- {name}: end -->)"
    text, found = re.subn(pattern, lambda match: match[1] + part + match[2], text, flags=re.DOTALL)
    if not found:
        raise ValueError(f"no part {name!r} in the page")
    return text


def written() -> dict[Path, str]:
    """README and the two pages as they should be."""
    return {
        README: with_part(README.read_text(), "demo", short_part()),
        DEMO_PAGE: with_part(DEMO_PAGE.read_text(), "demo", demo_part()),
        RECIPE_PAGE: with_part(RECIPE_PAGE.read_text(), "keys", keys_part()),
    }


def copy_results(source: Path) -> None:
    """What the pages are made from, out of a demo's folder."""
    (DEMO / "full").mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        shutil.copy(source / name, DEMO / name)
    for run in sorted(path.parent for path in source.glob("*/metrics.json")):
        (DEMO / run.name).mkdir(exist_ok=True)
        shutil.copy(run / "metrics.json", DEMO / run.name / "metrics.json")
    shutil.copy(source / "full" / "samples.jsonl", DEMO / "full" / "samples.jsonl")


def main(arguments: list[str]) -> int:
    if "--check" in arguments:
        return int(any(path.read_text() != text for path, text in written().items()))
    if arguments:
        copy_results(Path(arguments[0]))
    for path, text in written().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
