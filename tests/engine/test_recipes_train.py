"""The recipes on conversations: each trains a small model of its own class, with every key but sizes and steps."""

import json
import math
from pathlib import Path

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.helpers.tiny import ROOT, named
from zero_recipes.plan.job import known_models

RECIPES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / "recipes").glob("*.yaml"))}
NAMES = [name for name, recipe in RECIPES.items() if recipe.get("assistant_only_loss")]
SMALL = {"vocab_size": 1031, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
QUICK = {"max_steps": 2, "max_length": 128, "global_batch_size": 2, "eval_strategy": "no", "save_strategy": "no"}
QUICK |= {"sample_max_new_tokens": 2}
TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    row = {"messages": [{"role": "user", "content": "Say moss."}, {"role": "assistant", "content": "Moss, and moss."}]}
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(f"{json.dumps(row)}\n" * 64)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_trains_a_small_model_of_its_class(one, two, rows, tmp_path, name):
    recipe = RECIPES[name]
    if recipe.get("load_in_4bit"):
        pytest.importorskip("bitsandbytes")
    config = AutoConfig.for_model(**known_models()[recipe["model_name_or_path"]]["config"] | SMALL)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny_world" / "base")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    is_full, alone = not recipe.get("use_peft"), recipe.get("load_in_4bit")
    strategy = "single" if alone else "zero3" if is_full else "zero2"
    keys = {"model_name_or_path": tmp_path / "model", "dataset_name": rows, "output_dir": tmp_path / "out"} | QUICK
    options = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    argv = [f"recipes/{name}.yaml", *options, *named(strategy)]
    metrics = (one if alone else two).run("train", argv=argv)[0]["metrics"]
    assert (metrics["status"], metrics["strategy"]) == ("ok", strategy)
    assert len(metrics["loss_history"]) == 2 and all(math.isfinite(loss) for loss in metrics["loss_history"])
    assert 0 < metrics["tokens"]["supervised"] < metrics["tokens"]["non_padding"]
    assert (metrics["trainable_parameters"] == metrics["parameters"]) == is_full
    saved = "model.safetensors" if is_full else "adapter_model.safetensors"
    assert (tmp_path / "out" / saved).is_file()
    assert (tmp_path / "out" / "samples.jsonl").read_text().count("\n") == 2
