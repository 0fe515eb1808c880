"""Whatever a recipe, a ds_config or an accelerate file holds: `check` ends with findings; what it accepts trains."""

import json
import os
from collections import Counter
from contextlib import chdir

import pytest

from tests.helpers.mutations import write_mutated
from tests.helpers.seeded import count, draw, grid
from tests.helpers.tiny import write_recipe
from tests.helpers.two_ranks import set_by_launch
from zero_recipes.cli import main as cli
from zero_recipes.config.accelerate import launched_environment

KINDS = {"recipe": 200, "ds_config": 150, "accelerate": 150}  # how many of each in the grid


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "number"), [*((kind, 4) for kind in KINDS), *map(grid, KINDS, KINDS.values())])
def test_a_mutated_file_is_refused_or_trains(request, tmp_path, capsys, kind, number):
    """In the grid, what `check` accepts takes a step on two processes, or is refused before the weights are loaded."""
    recipe = json.loads(write_recipe(tmp_path, max_steps=1, output_dir="out").read_text())
    endings, wrong, kept, trains = Counter(), {}, dict(os.environ), number == KINDS[kind]
    for each in range(number):
        folder = tmp_path / str(each)
        options, changed = write_mutated(kind, folder, recipe, draw("mutations", kind, each))
        file = folder / "accelerate.yaml" if kind == "accelerate" else None
        try:
            with chdir(folder):
                code = cli.main(["check", "recipe.yaml", *options, "--num_processes", "2"])
                assert code in (0, 2), code
                endings["refused by check"] += code == 2
                if code == 0 and trains:
                    group = {"1": "one", "2": "two"}[launched_environment(file, 2).get("WORLD_SIZE", "1")]
                    how = {"argv": ["recipe.yaml"], "environment": set_by_launch(file, 2)} if file else {}
                    how = {"argv": ["recipe.yaml", *options], "environment": {}} | how
                    ranks = request.getfixturevalue(group).run("mutations.ended", folder=str(folder), **how)
                    assert len(set(ranks)) == 1, ranks
                    endings[ranks[0]] += 1
        except (Exception, SystemExit) as error:
            wrong[each] = f"{changed}: {type(error).__name__} {str(error)[-1500:]}"
        finally:
            os.environ.clear()
            os.environ.update(kept)
            capsys.readouterr()
    assert wrong == {}, "\n\n".join(wrong.values())
    if trains:
        count("mutations", kind, number=number, **endings)
