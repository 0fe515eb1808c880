"""Check and plan the recipes that a pull request changes: python scripts/pull_request.py --base origin/main

Writes a table in Markdown into the file that GITHUB_STEP_SUMMARY names, else to the terminal. Exits 1 where a recipe is
refused. action.yml calls it, and so can a pull request of this repository. Run it in the folder of the recipes'
repository, with zero-recipes installed.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ZERO_RECIPES = (sys.executable, "-m", "zero_recipes.tools.main")


@dataclass(frozen=True)
class Answer:
    """What a subcommand of zero-recipes printed, and whether it succeeded."""

    ok: bool
    printed: str


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="default: those in --folder that changed since --base")
    parser.add_argument("--base", default="origin/main", help="commit or branch; default: %(default)s")
    parser.add_argument("--folder", default="recipes", help="default: %(default)s")
    parser.add_argument("--gpu", default="h100-80gb", help="as zero-recipes plan takes it; default: %(default)s")
    parser.add_argument("--gpus", default="1,2,4,8", help="default: %(default)s")
    parser.add_argument("--price", help="of a GPU-hour")
    arguments = parser.parse_args(argv)
    recipes = arguments.recipes or changed_recipes(arguments.base, arguments.folder)
    options = ["--gpu", arguments.gpu, "--gpus", arguments.gpus]
    if arguments.price:
        options += ["--price", arguments.price]
    checks = {recipe: zero_recipes("check", recipe) for recipe in recipes}
    plans = {}
    for recipe, check in checks.items():
        if check.ok:
            plans[recipe] = zero_recipes("plan", recipe, *options, "--quick", "--json")
    write_summary(summary(checks, plans))
    return int(not all(check.ok for check in checks.values()))


def changed_recipes(base: str, folder: str) -> list[str]:
    """The YAML files in a folder that this branch added or changed since it left `base`."""
    command = ["git", "diff", "--name-only", "--diff-filter=ACMR", "-z", f"{base}...HEAD", "--", folder]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    return [name for name in names if name.endswith((".yaml", ".yml"))]


def zero_recipes(*words: str) -> Answer:
    """Run a subcommand."""
    done = subprocess.run([*ZERO_RECIPES, *words], capture_output=True, text=True)
    return Answer(done.returncode == 0, done.stdout if done.returncode == 0 else done.stdout + done.stderr)


def summary(checks: dict[str, Answer], plans: dict[str, Answer]) -> str:
    """The table, and below it what `check` printed of each recipe that is not without findings."""
    if not checks:
        return "No recipe has changed.\n"
    lines = ["| recipe | check | plan | launch |", "| --- | --- | --- | --- |"]
    for recipe, check in checks.items():
        cells = plan_cells(plans[recipe]) if recipe in plans else ["", ""]
        lines.append(f"| {' | '.join([f'`{recipe}`', verdict(recipe, check), *cells])} |")
    for recipe, check in checks.items():
        if not verdict(recipe, check).endswith("0 errors, 0 warnings"):
            lines += ["", f"<details><summary>{recipe}</summary>", "", "```text", check.printed.strip(), "```", ""]
            lines += ["</details>"]
    return "\n".join([*lines, ""])


def verdict(recipe: str, check: Answer) -> str:
    """The first line of `check` without the recipe's name: "can run: 0 errors, 1 warning"."""
    first = check.printed.strip().partition("\n")[0]
    text = first.removeprefix(recipe).strip()
    return text if check.ok else f"**{text or 'failed'}**"


def plan_cells(plan: Answer) -> list[str]:
    """What the plan says in a sentence, and the command that it recommends."""
    if not plan.ok:
        return ["no plan", ""]
    document = json.loads(plan.printed)
    recommended = document["recommendation"]
    return [document["bottom_line"], f"`{recommended['command']}`" if recommended else ""]


def write_summary(text: str) -> None:
    """Append to the summary of GitHub's job, else print."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text)
    else:
        print(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
