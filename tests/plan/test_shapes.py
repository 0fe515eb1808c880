"""The shapes that the package brings are those of the models as the installed libraries build them."""

import json

import pytest

from benchmarks.shapes import named
from tests.helpers.seeded import grid
from zero_recipes.core.findings import Refusal
from zero_recipes.tools.plan.shape import as_json, name_of, of_model, shipped

DRAWN = {"pythia-6.9b with LoRA", "qwen3-8b-lora with LoRA", "granite-4.0-h-tiny"}


@pytest.mark.parametrize("all_of_them", [False, grid(True)])
def test_shipped_shapes_are_made_alike_anew(all_of_them):
    unknown = []
    for name, config, settings in named():
        written = as_json(config, settings)
        known = shipped().get(name_of(*written))
        if known is None:
            unknown.append((name, written))
        elif all_of_them or name in DRAWN:
            assert json.loads(json.dumps(of_model(*map(json.loads, written)))) == known, name
    for name, written in unknown:
        assert name.endswith("with LoRA")
        if all_of_them:
            with pytest.raises(Refusal):  # no target modules for this class
                of_model(*map(json.loads, written))
