"""num_processes and accelerate_config in a recipe, as `trl sft --config` takes them."""

from pathlib import Path

import pytest

from tests.helpers.faults import Side
from zero_recipes.checks.preflight import preflight
from zero_recipes.cli import main as cli
from zero_recipes.config import recipe as recipes
from zero_recipes.config.accelerate import launched_environment

ROOT = Path(__file__).resolve().parents[2]
FILES = {"zero2.yaml": (ROOT / "accelerate_configs" / "zero2.yaml").read_text()}
NAMED = "num_processes: 2\naccelerate_config: zero2.yaml"


@pytest.fixture
def case(tmp_path, monkeypatch):
    Side(recipe=NAMED, files=FILES).write(tmp_path)
    (tmp_path / "ds_configs").symlink_to(ROOT / "ds_configs")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("processes", "file", "agrees"), [(2, "zero2.yaml", True), (3, "zero2.yaml", False), (2, None, False)]
)
def test_they_are_taken_where_the_launch_is_the_same(case, processes, file, agrees):
    path = Path("recipe.yaml")
    environment = launched_environment(file and Path(file), processes)
    run, findings = preflight(path, recipes.read_recipe_file(path), [], environment)
    assert [finding.code for finding in findings if finding.level == "error"] == ([] if agrees else ["ZR347"])
    if agrees:
        assert run.strategy.zero_stage == 2 and not {"num_processes", "accelerate_config"} & set(run.explicit)


def test_check_takes_the_launch_of_the_recipe(case, capsys):
    assert cli.main(["check", "recipe.yaml"]) == 0
    said = capsys.readouterr().out
    assert "zero2" in said and "world size    2" in said
