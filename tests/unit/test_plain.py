"""A recipe that is read without TRL's parser has the values that the parser gives, or is left to it."""

import random

import pytest
import yaml

from zero_recipes.config import plain
from zero_recipes.config.plain import read_plain_recipe
from zero_recipes.config.read import parse_recipe
from zero_recipes.config.recipe import Recipe, read_recipe_file
from zero_recipes.core.files import FILES

RECIPES = sorted((FILES / "recipes").glob("*.yaml"))
VALUES = (None, True, False, 0, 1, -3, 0.5, 1.0, "1e-4", "2", "text", "all", "no", "steps", ["a"], {"a": "1e-3"}, "{}")
WORDS = ("true", "false", "no", "0", "1", "7", "-3", "0.5", "1e-4", "text", "steps", "none", "null", "[a, b]", "{}", "")


def assert_equal(recipe: Recipe, parsed: Recipe) -> None:
    own, expected = recipe.settings.as_dict(), parsed.settings.as_dict()
    apart = {key: (own.get(key), value) for key, value in expected.items() if repr(own.get(key)) != repr(value)}
    assert not apart
    assert own.keys() == expected.keys()
    assert dict(recipe.explicit) == dict(parsed.explicit)
    assert recipe.sha256 == parsed.sha256


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_every_recipe_is_read_without_the_parser(path):
    recipe = read_plain_recipe(path, read_recipe_file(path), [])

    assert_equal(recipe, parse_recipe(path, read_recipe_file(path), []))


@pytest.mark.parametrize("seed", range(40))
def test_drawn_values_are_the_parsers_or_left_to_it(tmp_path, seed):
    """Each value of each kind at keys drawn at random, of the file and of the command line."""
    drawn = random.Random(seed)
    known = sorted(plain.default_values())
    accepted = {}
    for key in drawn.sample(known, 12):
        value = drawn.choice(VALUES)
        path = tmp_path / "one.yaml"
        path.write_text(yaml.safe_dump({"model_name_or_path": "model", key: value}))
        if read_plain_recipe(path, read_recipe_file(path), []):
            accepted[key] = value
    overrides = []
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"model_name_or_path": "model"} | accepted))
    for key in drawn.sample(known, 12):
        words = [f"--{key}", drawn.choice(WORDS)]
        if read_plain_recipe(path, read_recipe_file(path), words):
            overrides += words
    recipe = read_plain_recipe(path, read_recipe_file(path), overrides)

    assert_equal(recipe, parse_recipe(path, read_recipe_file(path), overrides))


@pytest.mark.parametrize(
    "line", ["max_step: 3", "max_steps: many", "learning_rate: -1.0", "optim: sgdd", "fp16: 1", "datasets: [a]"]
)
def test_what_is_wrong_is_left_to_the_parser(tmp_path, line):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model_name_or_path: model\n{line}\n")

    assert read_plain_recipe(path, read_recipe_file(path), []) is None


def test_other_versions_of_the_libraries_are_left_to_the_parser(tmp_path, monkeypatch):
    path = tmp_path / "recipe.yaml"
    path.write_text("model_name_or_path: model\n")
    monkeypatch.setattr("zero_recipes.core.measured_on.version_of", lambda library: "0.1")

    assert read_plain_recipe(path, read_recipe_file(path), []) is None
