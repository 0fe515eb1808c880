"""Configurations of other projects: what became of each when it was run, and whether it is accepted today."""

from __future__ import annotations

import json
import random

import pytest

from tests.helpers import public_files as public
from tests.helpers.tiny import write_recipe

ROWS = json.loads(public.TABLE.read_text())
AT_HAND = {(row["project"], row["path"]) for row in public.index()}
HERE = [row for row in ROWS if (row["project"], row["path"]) in AT_HAND]
SOME = 24  # files, enough for a fast look at each kind


@pytest.mark.skipif(not HERE, reason=f"the files of other projects are not at {public.FOLDER}")
@pytest.mark.parametrize("size", [SOME, pytest.param(len(HERE), marks=pytest.mark.grid)])
def test_each_is_accepted_or_refused_as_it_was(tmp_path, size):
    recipe = write_recipe(tmp_path, max_steps=2, save_model=True)
    for row in random.Random(size).sample(HERE, min(size, len(HERE))):
        argv, environment, _ = public.launch_of(row, recipe, tmp_path / "out")
        refused = public.codes_of(row, argv, environment) != []
        assert refused == (row["ended"] == "refused"), (row["project"], row["path"])


@pytest.mark.grid
@pytest.mark.skipif(not HERE, reason=f"the files of other projects are not at {public.FOLDER}")
def test_each_that_is_accepted_runs_and_saves_a_whole_model(one, two, tmp_path):
    recipe, died = write_recipe(tmp_path, max_steps=2, save_model=True), []
    for number, row in enumerate(row for row in HERE if row["ended"] == "ran"):
        argv, environment, processes = public.launch_of(row, recipe, tmp_path / f"out{number}")
        ranks = (one if processes == 1 else two).run("public_cases.ours_launched", argv=argv, environment=environment)
        died += [(row["path"], rank["said"]) for rank in ranks if rank["ended"] != "ran"]
    assert died == []
