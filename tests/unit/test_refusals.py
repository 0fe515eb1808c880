"""What is known to go wrong is refused: exit code 2 on every rank, one message from rank 0, before weights load."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.helpers.tiny import write_recipe
from zero_recipes.checks.preflight import preflight
from zero_recipes.config import recipe as recipes
from zero_recipes.config import strategy
from zero_recipes.core.findings import Refusal
from zero_recipes.model import sizes_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("refusals"))


def refused(argv: list[str], environment: dict[str, str] | None = None) -> Refusal:
    """The refusal that parsing and resolving end in."""
    with pytest.raises(Refusal) as caught:
        path, overrides = recipes.split_command_line(argv)
        recipe = recipes.parse_recipe(path, recipes.read_recipe_file(path), overrides)
        strategy.resolve_strategy(recipe.settings, environment or {}, sizes_of)
        recipes.derive_accumulation(recipe.settings, recipe.given, int((environment or {}).get("WORLD_SIZE", 1)))
    return caught.value


def test_a_misspelt_key_is_named_with_its_neighbour(good):
    refusal = refused([str(good), "--lerning_rate", "1e-4"])
    assert "`lerning_rate`" in refusal.what and "`learning_rate`" in refusal.fix
    # an abbreviation that argparse would complete in silence
    abbreviated = refused([str(good), "--max_step", "3"])
    assert refusal.codes == abbreviated.codes == ["ZR103"] and "`max_step`" in abbreviated.what


def test_misspelt_and_launch_keys_in_the_file(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("model_name_or_path: x\nper_device_batch_size: 4\n")
    refusal = refused([str(path)])
    assert refusal.codes == ["ZR103"]
    assert "`per_device_batch_size`" in refusal.what and "per_device_train_batch_size" in refusal.fix
    path.write_text("model_name_or_path: x\nnum_machines: 4\n")
    refusal = refused([str(path)])
    assert refusal.codes == ["ZR102"]
    assert "num_machines" in refusal.what and "accelerate launch --config_file" in refusal.fix
    path.write_text("config_file: zero2.yaml\n")  # accelerate_config and num_processes: test_launch_keys.py
    assert refused([str(path)]).codes == ["ZR102"]


def test_missing_and_broken_recipes(tmp_path):
    missing = refused(["recipes/tyni.yaml"])
    assert missing.codes == ["ZR116"] and "recipes/tiny.yaml" in missing.fix
    assert refused([]).codes == refused(["--max_steps", "3"]).codes == ["ZR115"]
    path = tmp_path / "r.yaml"
    path.write_text("a: [1\n")
    assert refused([str(path)]).codes == ["ZR117"]
    path.write_text("")
    assert refused([str(path)]).codes == ["ZR118"]
    path.write_text('env: {A: "a\\0b"}')  # no environment holds it
    assert refused([str(path)]).codes == ["ZR199"]


def test_a_wrong_value_is_no_usage_dump(good):
    refusal = refused([str(good), "--max_steps", "many"])
    assert refusal.codes == ["ZR124"] and "max_steps" in refusal.what and "many" in refusal.what


@pytest.mark.parametrize("total, world, micro", [(7, 2, 2), (0, 1, 2), (6, 4, 2)])
def test_a_global_batch_that_does_not_divide(good, total, world, micro):
    argv = [str(good), "--global_batch_size", str(total), "--per_device_train_batch_size", str(micro)]
    refusal = refused(argv, {"WORLD_SIZE": str(world)})
    assert refusal.codes == ["ZR121"]
    assert f"global_batch_size {total}" in refusal.what and f"{world} processes" in refusal.what


def test_a_global_batch_that_divides_sets_the_accumulation(good):
    recipe = recipes.parse_recipe(good, recipes.read_recipe_file(good), ["--global_batch_size", "24"])
    assert recipes.derive_accumulation(recipe.settings, recipe.given, 3) == 4
    recipe = recipes.parse_recipe(
        good, recipes.read_recipe_file(good), ["--global_batch_size", "24", "--gradient_accumulation_steps", "2"]
    )
    with pytest.raises(Refusal) as caught:
        recipes.derive_accumulation(recipe.settings, recipe.given, 3)
    assert caught.value.codes == ["ZR122"]


LAUNCHED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds_configs/zero3.json"}


def test_two_ds_configs_are_refused_by_both_names(good):
    refusal = refused([str(good), "--deepspeed", "ds_configs/zero2.json"], LAUNCHED)
    assert refusal.codes == ["ZR201"]
    assert "ds_configs/zero2.json" in refusal.what and "ds_configs/zero3.json" in refusal.what
    recipe = recipes.parse_recipe(good, recipes.read_recipe_file(good), ["--deepspeed", "ds_configs/zero3.json"])
    assert strategy.resolve_strategy(recipe.settings, LAUNCHED, sizes_of).name == "zero3"


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


def test_ds_configs_that_cannot_be_read(good, tmp_path):
    assert refused([str(good), "--deepspeed", "ds_configs/zero9.json"]).codes == ["ZR202"]
    path = tmp_path / "c.json"
    path.write_text('{"zero_optimization": {"stage": 2}} // note')
    commented = refused([str(good), "--deepspeed", str(path)])
    assert commented.codes == ["ZR203"] and "comments" in commented.why
    path.write_text('{"zero_optimization": {"stage": 5}}')
    unknown = refused([str(good), "--deepspeed", str(path)])
    assert unknown.codes == ["ZR211"] and "is 5" in unknown.what


def test_stage_3_that_would_save_nothing_hides_nothing_else(good):
    config = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3, "offload_param": {"device": "nvme"}}}
    launched = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    alone, hidden = ["--deepspeed", json.dumps(config)], {}
    for saves in ("true", "false"):
        _, findings = preflight(good, recipes.read_recipe_file(good), [*alone, "--save_model", saves], launched, "here")
        hidden[saves] = [finding.code for finding in findings if finding.level == "error"]
    assert hidden["true"].count("ZR206") == 1 and "ZR206" not in hidden["false"]
    assert len(hidden["false"]) > 3 and set(hidden["false"]) < set(hidden["true"])


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


# The same, whole: processes started by hand as two ranks, without a launcher between them and the test.
