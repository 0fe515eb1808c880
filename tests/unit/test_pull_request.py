"""What action.yml writes about the recipes of a pull request."""

import json
import shutil
import subprocess

import pytest

from scripts.pull_request import Answer, changed_recipes, main, summary
from tests.helpers.tiny import ROOT

TINY = ROOT / "tiny_world" / "base"
RECIPE = f"""model_name_or_path: {TINY}
datasets:
  - path: json
    data_files: [{ROOT}/tiny_world/validation.jsonl]
dataset_format: alpaca
max_length: 128
max_steps: 4
warmup_steps: 1
bf16: true
per_device_train_batch_size: 8
learning_rate: 1.0e-4
report_to: none
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with two recipes on main, and a branch that changes one, removes one and adds others."""
    monkeypatch.chdir(tmp_path)
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "kept.yaml").write_text("max_steps: 1\n")
    (recipes / "changed.yaml").write_text("max_steps: 1\n")
    (recipes / "removed.yaml").write_text("max_steps: 1\n")
    git("init", "-q", "-b", "main")
    commit()
    git("checkout", "-q", "-b", "branch")
    (recipes / "changed.yaml").write_text(RECIPE)
    (recipes / "removed.yaml").unlink()
    (recipes / "new one.yaml").write_text(RECIPE.replace("max_steps", "max_stepz"))
    (recipes / "notes.md").write_text("no recipe")
    (tmp_path / "other.yaml").write_text("max_steps: 1\n")
    commit()
    return tmp_path


def git(*words):
    subprocess.run(["git", *words], check=True, capture_output=True)


def commit():
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q", "-m", "x")


def test_recipes_that_the_branch_added_or_changed(repository):
    assert changed_recipes("main", "recipes") == ["recipes/changed.yaml", "recipes/new one.yaml"]
    git("checkout", "-q", "main")
    (repository / "recipes" / "kept.yaml").write_text("max_steps: 2\n")
    commit()  # main goes on: not what the branch has changed
    git("checkout", "-q", "branch")
    assert changed_recipes("main", "recipes") == ["recipes/changed.yaml", "recipes/new one.yaml"]
    assert changed_recipes("HEAD", "recipes") == []


def test_a_row_has_the_plan_and_a_refused_recipe_its_findings():
    plan = (ROOT / "benchmarks" / "results" / "pythia_plan.json").read_text()
    checks = {
        "a.yaml": Answer(True, "a.yaml can run: 0 errors, 0 warnings\nstrategy single\n"),
        "b.yaml": Answer(False, "b.yaml cannot run: 1 error, 0 warnings\nZR103 unknown key\n"),
    }
    text = summary(checks, {"a.yaml": Answer(True, plan)})
    document = json.loads(plan)
    row_a, row_b = text.splitlines()[2:4]
    assert document["bottom_line"] in row_a and document["recommendation"]["command"] in row_a
    assert row_b == "| `b.yaml` | **cannot run: 1 error, 0 warnings** |  |  |"
    assert "ZR103 unknown key" in text and "strategy single" not in text


@pytest.mark.grid  # two checks and a plan: a minute
def test_the_script_checks_and_plans_what_has_changed(repository, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(repository / "summary.md"))
    assert main(["--base", "main", "--gpu", "4090", "--gpus", "1"]) == 1
    text = (repository / "summary.md").read_text()
    changed, new = text.splitlines()[2:4]
    assert changed.startswith("| `recipes/changed.yaml` | can run: 0 errors") and "1 x rtx4090-24gb" in changed
    assert new.startswith("| `recipes/new one.yaml` | **cannot run: 1 error") and "max_stepz" in text
    shutil.copy(repository / "recipes" / "changed.yaml", repository / "recipes" / "new one.yaml")
    assert main(["recipes/new one.yaml", "--gpu", "4090", "--gpus", "1", "--price", "2"]) == 0
    assert "price of the run" in (repository / "summary.md").read_text()
