"""Recipes and command lines: what is read, filled in, unset and refused before anything starts."""

import os
from pathlib import Path

import pytest

from zero_recipes.cli import main as cli
from zero_recipes.config import recipe as recipes
from zero_recipes.config import strategy
from zero_recipes.core.findings import Refusal
from zero_recipes.model import sizes_of

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
TINY = ROOT / "recipes" / "tiny.yaml"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_parses_and_trl_takes_it(path, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    recipe = recipes.parse_recipe(path, recipes.read_recipe_file(path), [])
    settings = recipe.settings.replace(use_cpu=True, output_dir=str(tmp_path))
    _, training_args, model_args, _ = recipes.trl_arguments(settings, path)
    assert settings.dataset_format == "alpaca" or training_args.assistant_only_loss, "questions would carry loss"
    assert (training_args.bf16, training_args.fp16) == (path.stem[-5:] != "-fp16", path.stem[-5:] == "-fp16")
    assert model_args.dtype == "float32", "ddp would train without an fp32 master"
    recipes.write_resolved(recipe.explicit, tmp_path / "resolved.yaml", ["x"], None)
    again = recipes.parse_recipe(tmp_path / "resolved.yaml", recipes.read_recipe_file(tmp_path / "resolved.yaml"), [])
    assert again.explicit == recipe.explicit


def test_missing_and_broken_recipes(tmp_path):
    def refused(*argv: str) -> Refusal:
        with pytest.raises(Refusal) as caught:
            recipes.read_recipe_file(recipes.split_command_line([*argv])[0])
        return caught.value

    missing = refused("recipes/tyni.yaml")
    assert missing.codes == ["ZR116"] and "recipes/tiny.yaml" in missing.fix
    assert refused().codes == refused("--max_steps", "3").codes == ["ZR115"]
    (tmp_path / "r.yaml").write_text('env: {A: "a\\0b"}')  # no environment holds it
    assert refused(str(tmp_path / "r.yaml")).codes == ["ZR199"]


def test_a_global_batch_that_divides_sets_the_accumulation():
    recipe = recipes.parse_recipe(TINY, {}, ["--per_device_train_batch_size", "2", "--global_batch_size", "24"])
    assert recipes.derive_accumulation(recipe.settings, recipe.explicit, 3) == 4


LAUNCHED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds_configs/zero3.json"}


@pytest.mark.parametrize(
    ("mapping", "overrides", "environment", "name"),
    [
        ({}, [], {}, "single"),
        ({}, [], {"WORLD_SIZE": "2"}, "ddp"),
        ({}, [], LAUNCHED | {"WORLD_SIZE": "2"}, "zero3"),
        ({}, ["--deepspeed", "ds_configs/zero2_offload.json"], {}, "zero2_offload"),
        ({}, ["--deepspeed", '{"zero_optimization": {"stage": 1}}'], {}, "zero1"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, [], {}, "zero2"),
    ],
)
def test_strategies_are_found_under_every_launcher(monkeypatch, mapping, overrides, environment, name):
    monkeypatch.chdir(ROOT)
    recipe = recipes.parse_recipe(TINY, {"model_name_or_path": "x"} | mapping, overrides)
    assert strategy.resolve_strategy(recipe.settings, environment, sizes_of).name == name


def test_a_plain_trl_recipe_is_read_as_trl_reads_it(tmp_path, monkeypatch):
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

    monkeypatch.delenv("ZERO_RECIPES_TEST", raising=False)
    path = tmp_path / "trl.yaml"
    path.write_text(
        "env:\n  ZERO_RECIPES_TEST: 7\nmodel_name_or_path: m\ndatasets:\n  - path: json\n    data_files: d.jsonl\n"
        "test_split_size: 0.1\nlearning_rate: 1e-5\npacking: false\nlora_target_modules: [q, v]\nuse_cpu: true\n"
        "output_dir: o\nreport_to: none\nbf16: false\n"
    )
    recipe = recipes.parse_recipe(path, recipes.read_recipe_file(path), ["--max_steps", "5"])
    assert os.environ["ZERO_RECIPES_TEST"] == "7"
    ours = recipes.trl_arguments(recipe.settings, path)
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
    theirs = parser.parse_args_and_config(["--config", str(path), "--max_steps", "5"])
    for mine, wanted in zip(ours, theirs, strict=False):
        mine, wanted = (vars(x) | {"logging_dir": None, "distributed_state": None} for x in (mine, wanted))
        assert {k: str(v) for k, v in mine.items()} == {k: str(v) for k, v in wanted.items()}


MEET = ["meet", "--machine_rank", "0", "--hosts"]
SWEEP = ["sweep", "recipes/tiny.yaml"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([*SWEEP, "--num_processes", "0"], "0 is not above zero"),
        ([*SWEEP, "--strategies", "zero9"], "ZR328"),
        ([*MEET, "a,,b"], "'a,,b' has an empty name"),
        ([*MEET, "localhost", "--seconds", "nan"], "nan is not above zero"),
        ([*SWEEP, "--output_dir", "README.md/below"], "README.md"),
        (["check", "recipes"], "ZR116"),
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


@pytest.mark.parametrize(("word", "joined"), [("null", True), ("None", False), ("NULL", False)])
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
