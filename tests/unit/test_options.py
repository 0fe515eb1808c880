"""Odd values on the command lines of the verbs, and keys that the command line unsets."""

from pathlib import Path

import pytest

from zero_recipes.cli import main as cli
from zero_recipes.config import recipe as recipes

ROOT = Path(__file__).resolve().parents[2]
PLAN = ["plan", "recipes/tiny.yaml", "--gpus", "1", "--gpu", "h100-80gb", "--quick"]
MEET = ["meet", "--machine_rank", "0", "--hosts"]
SWEEP = ["sweep", "recipes/tiny.yaml"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([*SWEEP, "--num_processes", "0"], "0 is not above zero"),
        ([*SWEEP, "--num_processes", "two"], "invalid number value: 'two'"),
        ([*SWEEP, "--strategies", ""], "'' has an empty name"),
        ([*SWEEP, "--strategies", "zero9"], "ZR328"),
        ([*MEET, "a,,b"], "'a,,b' has an empty name"),
        ([*MEET, "localhost", "--seconds", "nan"], "nan is not above zero"),
        ([*PLAN, "--price", "-1"], "-1 is not above zero"),
        ([*SWEEP, "--output_dir", "README.md"], "README.md"),
        ([*PLAN, "--output_dir", "README.md/below"], "README.md"),
        (["check", "recipes"], "ZR116"),
        (["fetch", "recipes"], "ZR116"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_what_can_mean_nothing_is_refused(argv, said, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    try:
        code = cli.main(argv)
    except SystemExit as error:  # argparse's own
        code = error.code
    assert code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("word", ["null", "None", "NULL"])
@pytest.mark.parametrize("joined", [True, False])
def test_null_unsets_a_key_that_may_be_null(tmp_path, word, joined):
    path = tmp_path / "recipe.yaml"
    path.write_text("sample_prompts: [a]\nmax_length: 64\nreport_to: wandb\nlora_target_modules: [a, b]\n")
    keys = ["sample_prompts", "max_length", "lora_target_modules"]
    words = [part for key in keys for part in ([f"--{key}={word}"] if joined else [f"--{key}", word])]
    recipe = recipes.parse_recipe(path, recipes.read_recipe_file(path), [*words, "--seed", "3", "--report_to", "none"])
    assert [getattr(recipe.settings, key) for key in keys] == [None] * 3
    assert {key: recipe.explicit[key] for key in keys} == dict.fromkeys(keys)
    assert recipe.settings.seed == 3 and recipe.settings.report_to == "none"


def test_a_key_of_the_recipe_is_not_taken_for_an_option_that_begins_so():
    arguments = cli.parse_arguments(["check", "recipes/tiny.yaml", "--num_proc", "4"])
    assert arguments.num_processes is None and arguments.overrides == ["--num_proc", "4"]
