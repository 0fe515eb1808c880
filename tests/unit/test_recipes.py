"""Recipes, ds_configs and command lines: what is read, filled in, unset, refused, and what is from elsewhere."""

import dataclasses
import json
import re

import pytest
import yaml

from tests.helpers.faults import ROOT, Side
from tests.helpers.tools import refusal_of
from zero_recipes.config import keys
from zero_recipes.config import recipe as recipes
from zero_recipes.config.command_line import split_command_line
from zero_recipes.config.read import MAPPINGS, NUMBER_MAPPINGS, parse_recipe, read_recipe
from zero_recipes.config.recipe_arguments import RecipeArguments
from zero_recipes.config.resolved_recipe import write_resolved
from zero_recipes.config.settings import Settings
from zero_recipes.config.trl_arguments import trl_arguments
from zero_recipes.core.findings import Refusal
from zero_recipes.model.config import adapter_config
from zero_recipes.tools import main as cli

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_parses_and_trl_takes_it(path, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    recipe = parse_recipe(path, recipes.read_recipe_file(path), [])
    settings = recipe.settings.replace(use_cpu=True, output_dir=str(tmp_path))
    _, training_args, model_args, _ = trl_arguments(settings, path)
    assert settings.dataset_format == "alpaca" or training_args.assistant_only_loss, "questions would carry loss"
    assert (training_args.bf16, training_args.fp16) == (path.stem[-5:] != "-fp16", path.stem[-5:] == "-fp16")
    assert (model_args.dtype == "float32") != model_args.use_peft, "no fp32 master under ddp, or frozen weights in fp32"
    write_resolved(recipe.explicit, tmp_path / "resolved.yaml", ["x"], None)
    again = parse_recipe(tmp_path / "resolved.yaml", recipes.read_recipe_file(tmp_path / "resolved.yaml"), [])
    assert again.explicit == recipe.explicit


def test_missing_recipes():
    def refused(*argv: str) -> Refusal:
        return refusal_of(lambda: recipes.read_recipe_file(split_command_line([*argv])[0]))

    missing = refused("recipes/tyni.yaml")
    assert missing.codes == ["ZR116"] and "recipes/tiny.yaml" in missing.fix
    assert refused().codes == refused("--max_steps", "3").codes == ["ZR115"]


OURS = {field.name for field in dataclasses.fields(RecipeArguments)}
LISTS = sorted(key for key, hint in keys.key_types().items() if "array" in keys.accepted_types(hint))
LISTS = [key for key in LISTS if key not in OURS | {"datasets"}]  # its entries are mappings
WORDS = {"debug": ["underflow_overflow"], "include_for_metrics": ["inputs", "loss"], "report_to": ["tensorboard"]}
# what the file says and what follows on the command line, of two words
LIST_FORMS = {
    "a word": lambda one, two: (one, []),
    "a list of one": lambda one, two: ([one], []),
    "a list": lambda one, two: ([one, two], []),
    "an empty list": lambda one, two: ([], []),
    "a word, typed": lambda one, two: (None, [one]),
    "words, typed": lambda one, two: (None, [one, two]),
    "a typed word over a list": lambda one, two: ([one, two], [two]),
}


def targets_or_error(make, keys_of_lora) -> str:
    """The lists of a PeftConfig, or PEFT's words where it takes no such value."""
    try:
        found = make(keys_of_lora)
    except TypeError as error:
        return str(error)
    lists = (found.target_modules, found.target_parameters, found.modules_to_save)
    return str([sorted(names) if isinstance(names, set) else names for names in lists])  # PEFT's sets have no order


@pytest.mark.parametrize("form", LIST_FORMS.values(), ids=LIST_FORMS)
@pytest.mark.parametrize("key", LISTS)
def test_a_list_is_what_trls_parser_makes_of_it(key, form, tmp_path):
    """And is it again in recipe.resolved.yaml. The words of LoRA's targets have no module of their own name."""
    from trl import TrlParser, get_peft_config

    words = WORDS.get(key, ["all-linear", "proj.*"])
    in_file, typed = form(words[0], words[-1])
    path, again = tmp_path / "r.yaml", tmp_path / "again.yaml"
    known = {"use_peft": True, "use_cpu": True, "bf16": False, "output_dir": str(tmp_path)}
    path.write_text(json.dumps(known | ({} if in_file is None else {key: in_file})))
    overrides = [f"--{key}", *typed] if typed else []
    parser = TrlParser(keys.dataclasses_of_a_recipe())
    try:
        theirs = parser.parse_args_and_config(["--config", str(path), *overrides])
    except ValueError as error:
        assert "are not used by the HfArgumentParser" in str(error)
        assert refusal_of(lambda: parse_recipe(path, recipes.read_recipe_file(path), overrides))
        return
    recipe = parse_recipe(path, recipes.read_recipe_file(path), overrides)
    write_resolved(recipe.explicit, again, [], None)
    resolved = parse_recipe(again, recipes.read_recipe_file(again), [])
    wanted = targets_or_error(get_peft_config, theirs[2])
    for settings in (recipe.settings, resolved.settings):
        for mine, their in zip(trl_arguments(settings, path), theirs, strict=False):
            assert getattr(mine, key, None) == getattr(their, key, None)
        assert targets_or_error(adapter_config, settings) == wanted


def test_a_plain_trl_recipe_is_read_as_trl_reads_it(tmp_path):
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

    path = tmp_path / "trl.yaml"
    path.write_text(
        "env:\n  ZERO_RECIPES_TEST: 7\nmodel_name_or_path: m\ndatasets:\n  - path: json\n    data_files: d.jsonl\n"
        "test_split_size: 0.1\nlearning_rate: 1e-5\npacking: false\nlora_target_modules: [q, v]\nuse_cpu: true\n"
        "output_dir: o\nreport_to: none\nbf16: false\n"
    )
    mapping = recipes.read_recipe_file(path)
    recipe = parse_recipe(path, mapping, ["--max_steps", "5"])
    assert mapping.environment["ZERO_RECIPES_TEST"] == "7"
    ours = trl_arguments(recipe.settings, path)
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
    theirs = parser.parse_args_and_config(["--config", str(path), "--max_steps", "5"])
    for mine, wanted in zip(ours, theirs, strict=False):
        mine, wanted = (vars(x) | {"logging_dir": None, "distributed_state": None} for x in (mine, wanted))
        assert {k: str(v) for k, v in mine.items()} == {k: str(v) for k, v in wanted.items()}


SWEEP = ["sweep", "recipes/tiny.yaml"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([*SWEEP, "--num_processes", "0"], "0 is not above zero"),
        ([*SWEEP, "--strategies", "zero9"], "ZR304"),
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
    recipe = parse_recipe(path, recipes.read_recipe_file(path), [*words, "--seed", "3", "--report_to", "none"])
    assert [getattr(recipe.settings, key) for key in keys] == [None] * 3
    assert {key: recipe.explicit[key] for key in keys} == dict.fromkeys(keys)
    assert recipe.settings.seed == 3 and recipe.settings.report_to == "none"
    words += ["--max_length", "32"]
    assert parse_recipe(path, recipes.read_recipe_file(path), words).settings.max_length == 32, "the last counts"


LISTED = sorted(key for key, hint in keys.key_types().items() if keys.takes_lists(key, hint))
LISTS = {"datasets": [{"path": "a"}, {"path": "b", "weight": 2}], "debug": ["underflow_overflow", "tpu_metrics_debug"]}


@pytest.mark.parametrize("key", LISTED)
@pytest.mark.parametrize("joined", [True, False])
def test_a_list_is_written_on_the_command_line_as_in_a_recipe(tmp_path, key, joined):
    value = LISTS.get(key, ["exact_match", "token_f1"])
    in_file = tmp_path / "file.yaml"
    in_file.write_text(yaml.safe_dump({key: value}))
    wanted = getattr(parse_recipe(in_file, recipes.read_recipe_file(in_file), []).settings, key)
    bare = tmp_path / "bare.yaml"
    bare.write_text("seed: 1")
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).strip()
    words = [f"--{key}={text}"] if joined else [f"--{key}", text]
    recipe = parse_recipe(bare, {"seed": 1}, [*words, "--seed", "3"])
    assert getattr(recipe.settings, key) == wanted == recipe.explicit[key]
    assert recipe.settings.seed == 3


def test_lists_that_are_several_words_and_lists_of_the_wrong_kind(tmp_path):
    bare = tmp_path / "bare.yaml"
    bare.write_text("seed: 1")

    def parsed(*words: str) -> Settings:
        return parse_recipe(bare, {"seed": 1}, list(words)).settings

    assert parsed("--ignore", "ZR608", "ZR239").ignore == ["ZR608", "ZR239"]
    assert parsed("--ignore", "[ZR608]", "--ignore", "ZR239").ignore == ["ZR239"], "the last counts"
    assert parsed("--ignore", "ZR239", "--ignore", "[ZR608]").ignore == ["ZR608"]
    assert parsed("--sample_metrics", "[]").sample_metrics == []
    assert parsed("--optim_target_modules", "[qkv]_proj").optim_target_modules == "[qkv]_proj", "a pattern"
    assert refusal_of(parsed, "--sample_metrics", "[1, 2]").codes == ["ZR107"]
    assert "reading --label_names" in str(refusal_of(parsed, "--label_names", "[a: [}]"))


# what a file says, what the command line says, and the code of its finding
WRONG = {
    "an unknown key": ("max_step: 3", "--max_train 3", "ZR103"),
    "a wrong type": ("max_steps: 1.5", "--sample_metrics [1]", "ZR107"),
    "text that is out of range": ("learning_rate: 1e9", "--learning_rate 1e9", "ZR113"),
    "a number that is out of range": ("seed: -1", "--seed -1", "ZR113"),
    "not one of the choices": ("long_rows: shorten", "--long_rows shorten", ("ZR114", "ZR124")),
    "text that only the parser refuses": ('packing: "off"', "--packing off", "ZR124"),
    "a key of the launcher": ("hostfile: 2", "--hostfile 2", "ZR102"),
}


@pytest.mark.parametrize(("in_file", "typed", "codes"), WRONG.values(), ids=WRONG)
def test_a_wrong_key_is_found_once_and_left_out_and_the_rest_goes_on(in_file, typed, codes, tmp_path):
    path = tmp_path / "r.yaml"
    of_file, of_command_line = codes if isinstance(codes, tuple) else (codes, codes)
    path.write_text(f"max_length: 64\n{in_file}\noutput_dir: here\n")
    for words, wanted in (([], [of_file]), (typed.split(), [of_file, of_command_line])):
        words = [*words, "--max_length", "32"]
        recipe, findings, wrong_keys = read_recipe(path, recipes.read_recipe_file(path), words, {})
        assert [found.code for found in findings] == wanted
        keys_of_findings = {in_file.partition(":")[0]} | ({typed[2:].partition(" ")[0]} if len(wanted) > 1 else set())
        assert wrong_keys == {found.key for found in findings} == keys_of_findings
        assert dict(recipe.explicit) == {"max_length": 32, "output_dir": "here"}
        assert refusal_of(parse_recipe, path, recipes.read_recipe_file(path), words).codes == wanted


def test_a_wrong_override_leaves_what_the_file_says(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("seed: 7\nsave_model: false\n")
    for words, code in ((["--seed", "-1"], "ZR113"), (["--seed", "7", "8"], "ZR120"), (["8", "--bf16", "no"], "ZR120")):
        recipe, findings, _ = read_recipe(path, recipes.read_recipe_file(path), words, {})
        assert [found.code for found in findings] == [code] and recipe.settings.seed == 7
    assert read_recipe(path, {}, ["--no_save_model"], {}).recipe.explicit == {"save_model": False}
    assert read_recipe(path, {}, ["--no_seed"], {}).wrong_keys == {"no_seed"}


def test_a_launch_that_cannot_be_read_is_one_finding_among_others(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("accelerate_config: nowhere\nmax_step: 3\n")
    _, findings, wrong_keys = read_recipe(path, recipes.read_recipe_file(path), [], {})
    assert [found.code for found in findings] == ["ZR304", "ZR103"] and wrong_keys == {"max_step"}


def test_a_recipe_that_is_none_says_what_it_is(tmp_path):
    (tmp_path / "broken.yaml").write_text("model_name_or_path: x\n  dataset_name: [x\n")
    (tmp_path / "picture.yaml").write_bytes(b"\x89PNG\x00")
    for name, words in (("broken.yaml", "no YAML"), ("picture.yaml", "binary"), (".", "is a folder")):
        assert words in str(refusal_of(recipes.read_recipe_file, tmp_path / name))


@pytest.mark.parametrize("text", ['{"question": "ask"}', "{question: ask}"])
def test_a_mapping_on_the_command_line_is_json_or_yaml(tmp_path, text):
    (tmp_path / "recipe.yaml").touch()
    recipe = parse_recipe(tmp_path / "recipe.yaml", {}, ["--columns", text])
    assert recipe.settings.columns == {"question": "ask"}


IN_MAPPINGS = {
    "lr_scheduler_kwargs": ("{lr_end: 1e-5}", {"lr_end": 1e-5}),
    "accelerator_config": ("{any: {num_steps: 1e0}}", {"any": {"num_steps": 1.0}}),
    "peft_config": ("{lora_dropout: 1E-1, revision: 12e4567}", {"lora_dropout": 0.1, "revision": "12e4567"}),
    "model_init_kwargs": ("{initializer_range: 2e-2, revision: 1e5}", {"initializer_range": 0.02, "revision": "1e5"}),
    "activation_checkpointing_kwargs": ("{a_b: [1e2, x1e2]}", {"a_b": [100.0, "x1e2"]}),
    "fsdp_config": ("{min_num_params: 1e8, transformer_layer_cls_to_wrap: [2e1]}",
                    {"min_num_params": 1e8, "transformer_layer_cls_to_wrap": ["2e1"]}),
    "deepspeed": ("{zero_optimization: {reduce_bucket_size: 5e8}, optimizer: {params: {betas: [9e-1, .1], lr: auto}}}",
                  {"zero_optimization": {"reduce_bucket_size": 5e8},
                   "optimizer": {"params": {"betas": [0.9, 0.1], "lr": "auto"}}}),
    "columns": ("{1e5: prompt, text: 1e5}", {"1e5": "prompt", "text": "1e5"}),
}  # fmt: skip


@pytest.mark.parametrize("key", IN_MAPPINGS)
def test_a_number_in_a_mapping_is_a_number(tmp_path, key):
    """PyYAML reads `1e-5`, without a dot, as text."""
    text, expected = IN_MAPPINGS[key]
    path = tmp_path / "r.yaml"
    path.write_text(f"{key}: {text}\noptim_args: 1e-5\nmodel_revision: 1e5\nlearning_rate: 1e-5\n")
    settings = parse_recipe(path, recipes.read_recipe_file(path), []).settings
    assert getattr(settings, key) == expected
    assert (settings.optim_args, settings.model_revision, settings.learning_rate) == ("1e-5", "1e5", 1e-5)
    if key in MAPPINGS:  # TRL reads the others of the command line as paths, or in its own way
        path.write_text("")
        assert getattr(parse_recipe(path, {}, [f"--{key}", text]).settings, key) == expected


def test_every_mapping_with_numbers_is_converted():
    known = {key for key, hint in keys.key_types().items() if "object" in keys.accepted_types(hint)}
    others = {"columns", "liger_kernel_config", "parallelism_config"}  # names, switches, an object
    assert set(NUMBER_MAPPINGS) == known - others


def test_a_key_of_the_recipe_is_not_taken_for_an_option_that_begins_so():
    arguments = cli.parse_arguments(["check", "recipes/tiny.yaml", "--num_proc", "4"])
    assert arguments.num_processes is None and arguments.overrides == ["--num_proc", "4"]


# from elsewhere: what `check` says of it

# In short texts of our own in the form of well-known projects.
HANDBOOK = """\
torch_dtype: bfloat16 # half the memory
use_flash_attention_2: false
preprocessing_num_workers: 2
evaluation_strategy: "no"
gradient_checkpointing: true
max_seq_length: 128
warmup_ratio: 0.1
logging_dir: runs
"""
OTHERS = {
    "axolotl": "base_model: m\nval_set_size: 0.05\nsequence_len: 128\nmicro_batch_size: 4\nflash_attention: true\n",
    "LLaMA-Factory": "stage: sft\nfinetuning_type: lora\nlora_rank: 8\ndataset: alpaca_en_demo\ncutoff_len: 128\n",
}


def test_check_says_how_each_key_of_an_older_trl_is_called_today(tmp_path, capsys):
    Side(recipe=HANDBOOK, without=("max_length", "activation_checkpointing")).write(tmp_path)
    assert cli.main(["check", str(tmp_path / "recipe.yaml")]) == 2
    printed = " ".join(capsys.readouterr().out.split())
    for today in (
        "dtype",
        "dataset_num_proc",
        "eval_strategy",
        "activation_checkpointing",
        "max_length",
        "warmup_steps",
    ):
        assert f"Write `{today}`." in printed, today
    for gone in ("use_flash_attention_2", "logging_dir"):
        assert f"`{gone}`" in printed, gone


@pytest.mark.parametrize("trainer", OTHERS)
def test_check_says_how_each_key_of_another_trainer_is_called_here(trainer, tmp_path, capsys):
    path, table = tmp_path / "theirs.yml", keys.tables()["other_trainers"][trainer]
    path.write_text(OTHERS[trainer])
    assert cli.main(["check", str(path)]) == 2
    said = "".join(capsys.readouterr())
    theirs = [key for key in table if re.search(rf"^{key}:", OTHERS[trainer], re.MULTILINE)]
    assert len(theirs) > 3 and said.count(f"is a key of {trainer}") == len(theirs)
    for key in theirs:
        name = table[key].get("to")
        assert f"`{key}` in " in said and (f"Write `{name}`." in said or not name), key
    assert said.count("[ZR187]") == 1 and "ZR103" not in said
