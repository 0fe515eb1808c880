"""README's commands name files, keys and options that exist."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from zero_recipes.cli import main as cli
from zero_recipes.config import recipe

ROOT = Path(__file__).resolve().parents[2]


def commands() -> list[list[str]]:
    """The lines of README's bash blocks, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_the_two_commands_are_targets_of_the_makefile():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= {words[1] for words in commands() if words[0] == "make"} <= targets


@pytest.mark.parametrize("command", [words for words in commands() if "run_sft.py" in words], ids=" ".join)
def test_a_run_names_files_and_keys_that_exist(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    path, overrides = recipe.split_command_line(command[command.index("run_sft.py") + 1 :])
    recipe.parse_recipe(path, recipe.read_recipe_file(path), overrides)
    assert all(Path(word).is_file() for word in command if word.endswith((".yaml", ".json")))


@pytest.mark.parametrize("command", [words for words in commands() if words[0] == "zero-recipes"], ids=" ".join)
def test_a_subcommand_takes_its_options(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = cli.parse_arguments(command[1:])
    assert arguments.verb == command[1] and callable(arguments.func)
    if getattr(arguments, "overrides", []):
        recipe.parse_recipe(arguments.recipe, recipe.read_recipe_file(arguments.recipe), arguments.overrides)


def test_the_check_of_the_machine_names_what_is_missing():
    script = ["sh", "scripts/check_machine.sh"]
    assert subprocess.run([*script, sys.executable], cwd=ROOT).returncode == 0
    bare = subprocess.run([*script, "no-such-python"], cwd=ROOT, capture_output=True, text=True)
    assert bare.returncode == 1 and "python3-dev" in bare.stderr and "apt-get install" in bare.stderr


def test_the_notebook_finds_what_it_imports():
    exec(notebook()[0], {})


@pytest.mark.grid
def test_the_notebook_runs(tmp_path):
    (tmp_path / "lesson.py").write_text("\n\n".join(notebook()))
    environment = os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(tmp_path / "lesson.py")], cwd=ROOT, env=environment, check=True)


def notebook() -> list[str]:
    cells = json.loads((ROOT / "docs" / "lesson.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
