"""A YAML file of axolotl or LLaMA-Factory: each key that it calls otherwise is named with the recipe's own."""

import re

import pytest

from zero_recipes.cli import main as cli
from zero_recipes.config import keys

# files of our own in the form of the two projects
AXOLOTL = """\
base_model: {model}
datasets:
  - path: {data}
    type: alpaca
val_set_size: 0.05
sequence_len: 128
sample_packing: true
micro_batch_size: 4
num_epochs: 1
optimizer: adamw_torch
adapter:
flash_attention: true
bf16: auto
wandb_project:
learning_rate: 0.0002
"""
FACTORY = """\
model_name_or_path: {model}
stage: sft
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: alpaca_en_demo
template: llama3
cutoff_len: 128
val_size: 0.1
learning_rate: 1.0e-4
"""

KEYS = keys.tables()["other_trainers"]


def test_the_keys_that_are_named_instead_exist_and_those_of_the_others_do_not():
    known = keys.key_types()
    for trainer, theirs in KEYS.items():
        for key, row in theirs.items():
            name, note = row.get("to"), row.get("note", "")
            assert key not in known, (trainer, key)
            assert name or note, (trainer, key)
            named = re.findall(r"`([a-z_0-9]+)(?=[:`])", note)
            here = {*known, "env", "all", "fa2", "sft", "flash_attention_2", "datasets", "all-linear", "split"}
            assert not name or name in known, (trainer, key)
            assert set(named) <= here, (trainer, key, set(named) - here)


@pytest.mark.parametrize(("trainer", "text"), [("axolotl", AXOLOTL), ("LLaMA-Factory", FACTORY)])
def test_check_says_how_each_key_is_called_here(trainer, text, tmp_path, capsys):
    path = tmp_path / "theirs.yml"
    path.write_text(text.format(model="./tiny_world/base", data="./tiny_world"))
    assert cli.main(["check", str(path)]) == 2
    said = "".join(capsys.readouterr())
    theirs = [key for key in KEYS[trainer] if re.search(rf"^{key}:", text, re.MULTILINE)]
    assert len(theirs) > 5
    for key in theirs:
        name = KEYS[trainer][key].get("to")
        assert f"`{key}` in " in said and (f"Write `{name}`." in said or not name), key
    assert said.count(f"is a key of {trainer}") == len(theirs) and said.count("[ZR187]") == 1 and "ZR103" not in said
