"""Configurations of other projects: the table of what became of each, and what is said of them today."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers import public_files as public
from tests.helpers.tiny import write_recipe

ROWS = json.loads(public.TABLE.read_text())
HERE = {(row["project"], row["path"]) for row in public.index()}
HERE = [row for row in ROWS if (row["project"], row["path"]) in HERE]
SOME = 24  # files, enough for a fast look at each kind


def test_none_that_is_accepted_dies_and_refusals_are_confirmed_by_running():
    kinds = Counter(public.kind_of(row) for row in ROWS)
    assert kinds["died"] == 0 and len(ROWS) >= 120
    assert (len(ROWS) - kinds["by rule"]) * 120 >= 110 * len(ROWS), kinds
    assert all((row["ended"] == "refused") == bool(row["codes"]) for row in ROWS)
    assert {row["license"] for row in ROWS} >= {"Apache-2.0", "MIT"} and all(len(row["commit"]) == 40 for row in ROWS)


@pytest.mark.skipif(not HERE, reason=f"the files of other projects are not at {public.FOLDER}")
@pytest.mark.parametrize("size", [SOME, pytest.param(len(HERE), marks=pytest.mark.grid)])
def test_what_is_said_of_each_is_what_the_table_says(tmp_path, size):
    recipe = write_recipe(tmp_path, max_steps=2, save_model=True)
    for row in random.Random(size).sample(HERE, min(size, len(HERE))):
        argv, environment, _ = public.launch_of(row, recipe, tmp_path / "out")
        assert public.codes_of(row, argv, environment) == row["codes"], (row["project"], row["path"])


@pytest.mark.grid
@pytest.mark.skipif(not HERE, reason=f"the files of other projects are not at {public.FOLDER}")
def test_each_that_is_accepted_runs_and_saves_a_whole_model(one, two, tmp_path):
    recipe, died = write_recipe(tmp_path, max_steps=2, save_model=True), []
    for number, row in enumerate(row for row in HERE if row["ended"] == "ran"):
        argv, environment, processes = public.launch_of(row, recipe, tmp_path / f"out{number}")
        ranks = (one if processes == 1 else two).run("public_cases.ours_launched", argv=argv, environment=environment)
        died += [(row["path"], rank["said"]) for rank in ranks if rank["ended"] != "ran"]
    assert died == []


def test_a_path_of_the_table_is_one_file():
    assert len({(row["kind"], row["project"], row["path"]) for row in ROWS}) == len(ROWS)
    assert not any(Path(row["path"]).is_absolute() for row in ROWS)
