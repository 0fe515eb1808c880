"""README and pages tell the truth: their files exist, their commands are the tools' own, their tables made of JSON."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from zero_recipes.cli import main as cli
from zero_recipes.config import recipe

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = "\n".join([README, *(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))])


def commands(text: str) -> list[list[str]]:
    """The lines of its bash blocks, each once, comments dropped and continued lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    split = [shlex.split(line, comments=True) for line in dict.fromkeys(lines) if line.strip()]
    return [command for command in split if command]


COMMANDS = commands(PAGES)


@pytest.mark.parametrize("text", [README, PAGES], ids=["README", "pages"])
def test_named_files_exist(text):
    folders = "recipes|ds_configs|accelerate_configs|docs|scripts|tests|zero_recipes"
    named = set(re.findall(rf"(?<![\w/])(?:{folders})/[\w./-]+\.\w+", text))  # trl/scripts/utils.py is TRL's
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_two_commands_are_targets_of_the_makefile():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {command[1] for command in commands(README) if command[0] == "make"} == {"demo", "test"} <= targets
    assert "make test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("command", [c for c in COMMANDS if "run_sft.py" in c], ids=" ".join)
def test_run_commands_name_a_recipe_and_keys_that_exist(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    path, overrides = recipe.split_command_line(command[command.index("run_sft.py") + 1 :])
    recipe.parse_recipe(path, recipe.read_recipe_file(path), overrides)
    for word in command:
        assert not word.endswith((".yaml", ".json")) or (ROOT / word).is_file()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c[0] == "zero-recipes"], ids=" ".join)
def test_tool_commands_are_verbs(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = cli.parse_arguments(command[1:])
    assert arguments.verb == command[1] and callable(arguments.func)
    if getattr(arguments, "overrides", []):  # keys of a recipe, or typing errors, which are refused
        recipe.parse_recipe(arguments.recipe, recipe.read_recipe_file(arguments.recipe), arguments.overrides)


def test_tables_are_made_from_committed_json():
    assert subprocess.run([sys.executable, "scripts/readme_demo.py", "--check"], cwd=ROOT, timeout=120).returncode == 0


def test_what_the_readme_says_of_a_plan_is_what_was_planned():
    """Of the committed answers the one for its command: two H100 of 80 GB."""
    said = "ddp and stages 0 to 2 do not fit, stage 3 does"
    assert said in " ".join(README.split())
    answers = json.loads((ROOT / "benchmarks" / "results" / "scenarios.json").read_text())["scenarios"]
    (found,) = (
        answer["strategies"]
        for answer in answers
        if (answer["model"], answer["count"], answer["gpu"]) == ("EleutherAI/pythia-6.9b-deduped", 2, "h100-80gb")
    )
    verdicts = {name: found[name]["verdict"] for name in ("ddp", "zero0", "zero1", "zero2", "zero3")}
    assert verdicts == dict.fromkeys(("ddp", "zero0", "zero1", "zero2"), "no") | {"zero3": "fits"}
    fit = [name for name, planned in found.items() if planned["verdict"] == "fits"]
    assert f"\n{', '.join(fit[:-1])} and {fit[-1]} fit on 2 x h100-80gb.\n" in README


def test_what_the_readme_shows_of_a_report_is_the_demo_s():
    judgements = json.loads((ROOT / "docs" / "demo" / "report.json").read_text())["judgements"]
    found = next(each for each in judgements if "staircase" in each["question"])
    said = found["measured"].partition(" Measured over")[0]
    assert f"\n{found['verdict']}  {found['question']}\n{said}\n" in README


def test_what_the_demo_says_beside_the_textbook_was_measured():
    page = " ".join((ROOT / "docs" / "demo.md").read_text().split())
    rows = {row["label"]: row for row in json.loads((ROOT / "docs" / "demo" / "report.json").read_text())["rows"]}
    assert "stage 0 holds 20Ψ in bf16" in page
    assert rows["zero0"]["state_bytes"] / rows["zero0"]["parameters"] == pytest.approx(20, rel=1e-3)
    assert "stage 2 holds as much as stage 1" in page and rows["zero1"]["state_bytes"] == rows["zero2"]["state_bytes"]
    assert "stages 1 and 2 move 3Φ a step" in page
    assert [rows[name]["communication_in_phi"] for name in ("zero1", "zero2")] == pytest.approx([3, 3], rel=1e-3)


def test_the_time_of_a_plan_is_the_measured_one():
    measured = json.loads((ROOT / "benchmarks" / "results" / "plan.json").read_text())["measured"].values()
    seven, large = (round(one["seconds"]) for one in measured)
    page = " ".join((ROOT / "docs" / "plan.md").read_text().split())
    assert f"take {seven} s on two cores (AMD EPYC), 70B at stage 3 on 64 GPUs {large} s" in page
    assert max(rank["resident_bytes"] for one in measured for rank in one["strategies"].values()) < 0.6e9


def test_the_check_of_the_machine_passes_here_and_names_what_is_missing(tmp_path):
    script = ["sh", "scripts/check_machine.sh"]
    assert subprocess.run([*script, sys.executable], cwd=ROOT).returncode == 0
    bare = subprocess.run([*script, "no-such-python"], cwd=ROOT, capture_output=True, text=True)
    assert bare.returncode == 1 and "python3-dev" in bare.stderr and "apt-get install" in bare.stderr
