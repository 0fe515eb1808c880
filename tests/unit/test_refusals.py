"""What is known to go wrong is refused: exit code 2 on every rank, one message from rank 0, before weights load."""

import os
from pathlib import Path

import pytest

from tests.helpers.tiny import write_recipe
from zero_recipes.config import recipe as recipes
from zero_recipes.config import strategy
from zero_recipes.core.findings import Refusal
from zero_recipes.model import sizes_of


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("refusals"))


def refused(argv: list[str], environment: dict[str, str] | None = None) -> Refusal:
    """The refusal that parsing and resolving end in."""
    with pytest.raises(Refusal) as caught:
        path, overrides = recipes.split_command_line(argv)
        recipe = recipes.parse_recipe(path, recipes.read_recipe_file(path), overrides)
        strategy.resolve_strategy(recipe.settings, environment or {}, sizes_of)
        recipes.derive_accumulation(recipe.settings, recipe.explicit, int((environment or {}).get("WORLD_SIZE", 1)))
    return caught.value


def test_missing_and_broken_recipes(tmp_path):
    missing = refused(["recipes/tyni.yaml"])
    assert missing.codes == ["ZR116"] and "recipes/tiny.yaml" in missing.fix
    assert refused([]).codes == refused(["--max_steps", "3"]).codes == ["ZR115"]
    path = tmp_path / "r.yaml"
    path.write_text('env: {A: "a\\0b"}')  # no environment holds it
    assert refused([str(path)]).codes == ["ZR199"]


def test_a_global_batch_that_divides_sets_the_accumulation(good):
    recipe = recipes.parse_recipe(good, recipes.read_recipe_file(good), ["--global_batch_size", "24"])
    assert recipes.derive_accumulation(recipe.settings, recipe.explicit, 3) == 4


LAUNCHED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds_configs/zero3.json"}


def test_strategies_are_found_under_every_launcher(good, tmp_path):
    def found(overrides, environment):
        return strategy.resolve_strategy(
            recipes.parse_recipe(good, recipes.read_recipe_file(good), overrides).settings, environment, sizes_of
        )

    assert found([], {}).name == "single"
    assert found([], {"WORLD_SIZE": "2"}).name == "ddp"
    assert found([], LAUNCHED | {"WORLD_SIZE": "2"}).zero_stage == 3
    assert found(["--deepspeed", "ds_configs/zero2_offload.json"], {}).name == "zero2_offload"
    assert found(["--deepspeed", '{"zero_optimization": {"stage": 1}}'], {}).name == "zero1"
    inline = tmp_path / "inline.yaml"
    inline.write_text("model_name_or_path: x\ndeepspeed:\n  zero_optimization:\n    stage: 2\n")
    recipe = recipes.parse_recipe(inline, recipes.read_recipe_file(inline), [])
    assert strategy.resolve_strategy(recipe.settings, {}, sizes_of).name == "zero2"


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
