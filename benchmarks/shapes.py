"""The shapes of all models and recipes that the package brings: python -m benchmarks.shapes

Writes zero_recipes/tools/plan/shapes.json, so that the first plan of one of them need not import torch, transformers
and PEFT. Needs no GPU, and some minutes. tests/plan/test_shapes.py makes some of them anew.
"""

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.atlas import compact
from zero_recipes.config.plain import read_plain_recipe
from zero_recipes.config.recipe import read_recipe_file
from zero_recipes.config.settings import Settings
from zero_recipes.core.files import FILES, write_text
from zero_recipes.core.findings import Refusal
from zero_recipes.core.measured_on import version_of
from zero_recipes.engine.warnings import quieten
from zero_recipes.tools.arguments import parse_arguments
from zero_recipes.tools.plan.command import requested
from zero_recipes.tools.plan.job import MODELS, model_config
from zero_recipes.tools.plan.shape import SHIPPED, as_json, name_of, of_model

BUILT_BY = ("transformers", "peft")


def main() -> None:
    quieten()
    shapes = {}
    for name, config, settings in named():
        written = as_json(config, settings)
        try:
            shapes[name_of(*written)] = of_model(*map(json.loads, written))
        except Refusal as refused:  # LoRA without target modules for this class
            print(f"{name}: {refused.what}", flush=True)
        else:
            print(name, flush=True)
    versions = {library: version_of(library) for library in BUILT_BY}
    lines = [f"{json.dumps(name)}:{compact(fields)}" for name, fields in sorted(shapes.items())]
    joined = ",\n".join(lines)
    write_text(SHIPPED, f'{{"versions":{json.dumps(versions)},"shapes":{{\n{joined}\n}}}}\n')
    print(f"{SHIPPED}: {SHIPPED.stat().st_size:,} bytes")


def named() -> Iterator[tuple[str, dict[str, Any], Settings]]:
    """(a name, a model's configuration, settings): each without and with LoRA."""
    for path in sorted(MODELS.glob("*.json")):
        arguments = parse_arguments(["plan", path.stem, "--gpus", "1"])
        request = requested(arguments, arguments.overrides)
        yield from ways(path.stem, request.config, request.recipe.settings)
    for path in sorted((FILES / "recipes").glob("*.yaml")):
        recipe = read_plain_recipe(path, read_recipe_file(path), [])
        assert recipe, path
        try:
            config = model_config(recipe.settings)
        except Refusal:  # a model that is only on the Hub
            continue
        yield from ways(path.stem, config, recipe.settings)


def ways(name: str, config: dict[str, Any], settings: Settings) -> Iterator[tuple[str, dict[str, Any], Settings]]:
    yield name, config, settings.replace(use_peft=False)
    yield f"{name} with LoRA", config, settings.replace(use_peft=True)


if __name__ == "__main__":
    main()
