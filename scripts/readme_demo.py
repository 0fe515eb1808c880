"""Copy a demo's results into docs/demo and the README: python scripts/readme_demo.py [output/demo]

Also writes the README's table of our own recipe keys. --check: exits 1 if the README is not what it would be.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = ("report.json", "report.md", "staircase.png", "throughput.png", "loss.png")
DEMO = ROOT / "docs" / "demo"


def demo_part() -> str:
    """The README's section on the demo, from docs/demo alone."""
    rows = json.loads((DEMO / "full" / "metrics.json").read_text())
    samples = [json.loads(line) for line in (DEMO / "full" / "samples.jsonl").read_text().splitlines()]
    machine = f"{rows['hardware']['cpu']}, {rows['hardware']['cpu_cores']} cores, no GPU"
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
Two processes on CPUs ({machine}), 40 steps for each strategy. Model-state bytes carry over to GPUs; times do not.

{table}

![model states](docs/demo/staircase.png)

![loss](docs/demo/loss.png)

![throughput](docs/demo/throughput.png)

The full run (ZeRO-2, {len(rows["loss_history"])} steps): over {len(samples)} held-out prompts {scores}.

| prompt | before | after |
|---|---|---|
{examples}

"""


def keys_part() -> str:
    """The table of the recipe keys that TRL does not have."""
    sys.path.insert(0, str(ROOT))
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


def written(readme: str) -> str:
    """The README with both parts filled in."""
    for name, part in (("demo", demo_part()), ("keys", keys_part())):
        pattern = rf"(<!-- {name}: begin[^\n]*-->\n).*?(<!-- {name}: end -->)"
        readme = re.sub(pattern, lambda found, part=part: found[1] + part + found[2], readme, flags=re.DOTALL)
    return readme


def main(arguments: list[str]) -> int:
    readme = ROOT / "README.md"
    if "--check" in arguments:
        return int(written(readme.read_text()) != readme.read_text())
    source = Path(arguments[0]) if arguments else ROOT / "output" / "demo"
    (DEMO / "full").mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        shutil.copy(source / name, DEMO / name)
    for run in sorted(path.parent for path in source.glob("*/metrics.json")):
        (DEMO / run.name).mkdir(exist_ok=True)
        shutil.copy(run / "metrics.json", DEMO / run.name / "metrics.json")
    shutil.copy(source / "full" / "samples.jsonl", DEMO / "full" / "samples.jsonl")
    readme.write_text(written(readme.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
