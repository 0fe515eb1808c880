"""The runs of a GPU session, which costs money: each is one that a run takes, and a failure is a row."""

from pathlib import Path

from benchmarks.session import cases, inputs
from zero_recipes.config import recipe as recipes

ROOT = Path(__file__).resolve().parents[2]
ALL = [case for part in cases.PARTS for case in cases.cases(part)]


def test_every_recipe_of_a_session_is_one_that_a_run_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert len({case.slug for case in ALL}) == len(ALL)
    for case in ALL:
        assert case.strategy == "single" or Path(f"accelerate_configs/{case.strategy}.yaml").is_file()
        if case.script == "side_by_side.py":
            continue
        path = inputs.write_recipe(case, tmp_path)
        read = recipes.parse_recipe(path, recipes.read_recipe_file(path), [])
        assert Path(read.settings.model_name_or_path, "config.json").is_file()
